//! The wgpu section of `doctor`: the adapters, by their number for `backend.gpu`.

use serde_json::{Value, json};
use sparse24_train::backend::wgpu::adapters;

pub(super) fn survey() -> (Value, Vec<String>) {
    let adapters = adapters();
    let mut lines: Vec<String> =
        adapters.iter().enumerate().map(|(at, name)| format!("adapter {at:<5} {name}")).collect();
    if lines.is_empty() {
        lines.push("adapter       none with Vulkan, Metal or Direct3D 12".to_owned());
    }
    (json!({ "adapters": adapters }), lines)
}
