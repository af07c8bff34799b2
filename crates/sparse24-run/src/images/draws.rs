//! Random numbers of one image or one batch, in the order in which they are asked for.

use sparse24_core::philox::{Purpose, Site, Stream, uniform};

/// The words of a stream from call 0 on, one after the other.
pub(super) struct Draws {
    stream: Stream,
    /// Words drawn so far.
    drawn: u64,
    words: [u32; 4],
}

impl Draws {
    /// The draws of the image at a place of an epoch: site (augmentation, place mod 2^24),
    /// micro-step place / 2^24, step epoch.
    pub(super) fn of_image(seed: u64, epoch: u32, place: u64) -> Self {
        let site = Site::new(Purpose::Augmentation, place as u32 & 0xff_ffff);
        Self::of(Stream::new(seed, site, (place >> 24) as u32, epoch))
    }

    /// The draws of a micro-batch: site (data order, 9), micro-step 0, step its number in the run.
    pub(super) fn of_batch(seed: u64, number: u64) -> Self {
        Self::of(Stream::new(seed, Site::new(Purpose::DataOrder, 9), 0, number as u32))
    }

    fn of(stream: Stream) -> Self {
        Self { stream, drawn: 0, words: [0; 4] }
    }

    fn word(&mut self) -> u32 {
        let at = (self.drawn % 4) as usize;
        if at == 0 {
            self.words = self.stream.words((self.drawn / 4) as u32);
        }
        self.drawn += 1;
        self.words[at]
    }

    /// In `[0, 1)`, a multiple of 2^-24.
    pub(super) fn uniform(&mut self) -> f64 {
        f64::from(uniform(self.word()))
    }

    /// In `[from, to)`.
    pub(super) fn between(&mut self, [from, to]: [f64; 2]) -> f64 {
        from + (to - from) * self.uniform()
    }

    /// Whether an event of this probability happens.
    pub(super) fn happens(&mut self, probability: f32) -> bool {
        self.uniform() < f64::from(probability)
    }

    /// An integer below n, which is below 2^32 and not 0.
    pub(super) fn below(&mut self, n: usize) -> usize {
        ((u64::from(self.word()) * n as u64) >> 32) as usize
    }

    /// A standard normal from two uniforms (Box and Muller 1958): sqrt(-2 ln (1 - u)) cos 2 pi v.
    pub(super) fn normal(&mut self) -> f64 {
        let (u, v) = (self.uniform(), self.uniform());
        libm::sqrt(-2.0 * libm::log(1.0 - u)) * libm::cos(2.0 * core::f64::consts::PI * v)
    }

    /// Beta(alpha, alpha) (Jöhnk 1964): of x = u^(1/alpha) and y = v^(1/alpha) with x + y in
    /// (0, 1], x / (x + y).
    pub(super) fn beta(&mut self, alpha: f32) -> f64 {
        let power = 1.0 / f64::from(alpha);
        loop {
            let [x, y] = [(); 2].map(|()| libm::pow(self.uniform(), power));
            if x + y > 0.0 && x + y <= 1.0 {
                return x / (x + y);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mean and variance of each distribution, within five standard errors.
    #[test]
    fn draws_have_their_mean_and_variance() {
        let mut draws = Draws::of_image(3, 1, 1 << 25);
        let n = 20_000;
        let third = 1.0 / 12.0;
        let mut check = |name: &str,
                         mean: f64,
                         variance: f64,
                         draw: &mut dyn FnMut(&mut Draws) -> f64| {
            let values: Vec<f64> = (0..n).map(|_| draw(&mut draws)).collect();
            let n = values.len() as f64;
            let found = values.iter().sum::<f64>() / n;
            let spread = values.iter().map(|x| (x - found).powi(2)).sum::<f64>() / n;
            assert!((found - mean).abs() <= 5.0 * (variance / n).sqrt(), "{name}: mean {found}");
            // The fourth moment of each is at most three times the squared variance.
            let bound = 5.0 * variance * (2.0 / n).sqrt();
            assert!((spread - variance).abs() <= bound, "{name}: variance {spread}");
        };
        check("uniform", 0.5, third, &mut Draws::uniform);
        check("between", 1.0, 16.0 * third, &mut |draws| draws.between([-1.0, 3.0]));
        check("normal", 0.0, 1.0, &mut Draws::normal);
        check("beta 1", 0.5, third, &mut |draws| draws.beta(1.0));
        // Variance 1 / (4 (2 alpha + 1)).
        check("beta 0.8", 0.5, 1.0 / 10.4, &mut |draws| draws.beta(0.8));
        check("below", 2.0, 2.0, &mut |draws| draws.below(5) as f64);
    }
}
