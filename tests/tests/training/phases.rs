//! When phases end, and how they are written.

use sparse24_core::phase::Fraction;
use sparse24_train::method::{Ends, Method, Phase, PhaseKind, Until, words::PhaseWord};

fn kinds(method: &Method, steps: u32, ends: &Ends) -> Vec<PhaseKind> {
    (0..=steps).map(|step| method.phases[method.phase_at(step, steps, ends)].kind()).collect()
}

#[test]
fn step_turns_sparse_where_its_variance_settled_and_in_the_middle_at_the_latest() {
    let method = Method::preset("step", 0.0).unwrap();
    let sparse_from =
        |ends: &Ends| kinds(&method, 100, ends).iter().position(|&kind| kind == PhaseKind::Sparse);
    assert_eq!(sparse_from(&Ends::new()), Some(51));
    let settled = Ends::from([(0, 17)]);
    assert_eq!(sparse_from(&settled), Some(18));
    assert_eq!(method.last_sparse_steps(100, &settled), [100], "the last model is 2:4");
    // A run of one step has no middle.
    assert_eq!(kinds(&method, 1, &Ends::new()), [PhaseKind::Dense; 2]);
}

#[test]
fn each_sparse_phase_leaves_a_model() {
    let ends = |phase: Phase, numerator| Phase {
        until: Until::Fraction(Fraction::new(numerator, 3).unwrap()),
        ..phase
    };
    let sparse = Phase { until: Until::Fraction(Fraction::ONE), ..Method::fst(0.0).phases[0] };
    let of = |phases: Vec<Phase>| {
        Method { phases, ..Method::dense() }.last_sparse_steps(12, &Ends::new())
    };
    assert_eq!(of(vec![ends(sparse, 1), ends(Phase::DENSE, 2), sparse]), [4, 12]);
    let without_step = vec![ends(Phase::DENSE, 1), ends(sparse, 1), Phase::DENSE];
    assert_eq!(of(without_step), [0; 0]);
    assert_eq!(of(vec![Phase::DENSE]), [0; 0]);
}

#[test]
fn phases_are_written_as_they_are_read() {
    for text in ["dense", "sparse:5/6", "frozen", "dense:settled", "frozen:1/2", "sparse:0"] {
        assert_eq!(text.parse::<PhaseWord>().unwrap().to_string(), text);
    }
    let half = Until::Fraction(Fraction::new(5, 10).unwrap());
    assert_eq!("sparse:0.5".parse::<PhaseWord>().unwrap().until, half);
    for text in ["", "sparse:", "dens", "sparse:7/6", "sparse 5/6", "dense:settled:1"] {
        assert_eq!(text.parse::<PhaseWord>(), Err(()), "{text}");
    }
}
