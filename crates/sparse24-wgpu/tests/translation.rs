//! Every kernel is valid WGSL, and translates to SPIR-V, MSL and HLSL. Needs no GPU.

use naga::{
    Expression, Module, ScalarKind,
    back::{hlsl, msl, spv},
    front::wgsl::parse_str,
    valid::{Capabilities, ModuleInfo, ValidationFlags, Validator},
};
use sparse24_wgpu::kernels::{KERNELS, Kernel, MOST_GROUPS, NEEDS};

/// A kernel that is valid, what is known of it, and which of its entry points is the kernel's.
fn validated(kernel: &Kernel) -> (Module, ModuleInfo, usize) {
    let module = parse_str(kernel.source).expect("valid WGSL");
    let mut validator = Validator::new(ValidationFlags::all(), Capabilities::empty());
    let info = validator.validate(&module).expect("valid WGSL");
    let at = module.entry_points.iter().position(|entry| entry.name == kernel.name);
    (module, info, at.expect("an entry point"))
}

fn translated(kernel: &Kernel) -> Result<[usize; 3], Box<dyn std::error::Error>> {
    let module = parse_str(kernel.source).map_err(|error| error.emit_to_string(kernel.source))?;
    let info = Validator::new(ValidationFlags::all(), Capabilities::empty()).validate(&module)?;
    let shader_stage = naga::ShaderStage::Compute;
    let entry_point = kernel.name.to_owned();
    let pipeline = spv::PipelineOptions { shader_stage, entry_point: entry_point.clone() };
    let spirv = spv::write_vec(&module, &info, &spv::Options::default(), Some(&pipeline))?;
    let entry = Some((shader_stage, entry_point));
    let options = msl::PipelineOptions { entry_point: entry.clone(), ..Default::default() };
    let (metal, _) = msl::write_string(&module, &info, &msl::Options::default(), &options)?;
    let (mut direct3d, options) = (String::new(), hlsl::Options::default());
    let pipeline = hlsl::PipelineOptions { entry_point: entry };
    hlsl::Writer::new(&mut direct3d, &options, &pipeline).write(&module, &info, None)?;
    Ok([spirv.len(), metal.len(), direct3d.len()])
}

#[test]
fn every_kernel_translates() {
    let failures = KERNELS.iter().filter_map(|kernel| match translated(kernel) {
        Ok(lengths) if lengths.into_iter().all(|length| length > 0) => None,
        Ok(lengths) => Some(format!("{}: {lengths:?}", kernel.name)),
        Err(error) => Some(format!("{}: {error}", kernel.name)),
    });
    let failures: Vec<_> = failures.collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn kernels_name_their_bindings() {
    for kernel in KERNELS {
        let module = parse_str(kernel.source).expect("valid WGSL");
        let storage = |access: naga::StorageAccess| {
            let space = naga::AddressSpace::Storage { access };
            module.global_variables.iter().filter(|(_, variable)| variable.space == space).count()
        };
        let read = naga::StorageAccess::LOAD;
        let bindings = [storage(read), storage(read | naga::StorageAccess::STORE)];
        assert_eq!(bindings, [kernel.inputs, kernel.outputs], "{}", kernel.name);
    }
}

/// WGSL lets an adapter change a NaN or a subnormal number when it is loaded as f32.
#[test]
fn bits_are_not_loaded_as_numbers() {
    for kernel in KERNELS {
        let module = parse_str(kernel.source).expect("valid WGSL");
        let functions = module.functions.iter().map(|(_, function)| function);
        let functions = functions.chain(module.entry_points.iter().map(|entry| &entry.function));
        for expressions in functions.map(|function| &function.expressions) {
            let of_a_load = |expression: &Expression| match *expression {
                Expression::As { expr, kind: ScalarKind::Uint, convert: None } => {
                    let Expression::Load { pointer } = expressions[expr] else { return false };
                    let Expression::Access { base, .. } = expressions[pointer] else {
                        return false;
                    };
                    matches!(expressions[base], Expression::GlobalVariable(_))
                }
                _ => false,
            };
            assert!(!expressions.iter().any(|(_, of)| of_a_load(of)), "{}", kernel.name);
        }
    }
}

/// Discrete results depend on no float, whose rounding WGSL leaves to the implementation.
#[test]
fn discrete_kernels_compute_in_integers() {
    const DISCRETE: [&str; 7] = [
        "mask_search",
        "row_mask_search",
        "column_mask_search",
        "permuted_mask",
        "compress_weight",
        "mvue_compress",
        "flip_count",
    ];
    let kernels = KERNELS.iter().filter(|kernel| DISCRETE.contains(&kernel.name));
    let checked = kernels.map(|kernel| {
        let (module, info, at) = validated(kernel);
        let (mut called, mut seen) =
            (vec![(&module.entry_points[at].function, info.get_entry_point(at))], vec![]);
        while let Some((function, of)) = called.pop() {
            for (handle, expression) in function.expressions.iter() {
                let inner = of[handle].ty.inner_with(&module.types);
                let kind = inner.scalar_kind();
                assert_ne!(kind, Some(ScalarKind::Float), "{}: {expression:?}", kernel.name);
                if let Expression::CallResult(callee) = *expression
                    && !seen.contains(&callee)
                {
                    seen.push(callee);
                    called.push((&module.functions[callee], &info[callee]));
                }
            }
        }
    });
    assert_eq!(checked.count(), DISCRETE.len());
}

/// Kernels keep to their stated needs, and constants to a slot of 256 bytes.
#[test]
fn kernels_need_no_more_than_stated() {
    let mut most = [0; 5];
    for kernel in KERNELS {
        let (module, info, at) = validated(kernel);
        let used = |space| {
            let of_entry = info.get_entry_point(at);
            let variables = module.global_variables.iter();
            let used = variables.filter(move |(handle, variable)| {
                variable.space == space && !of_entry[*handle].is_empty()
            });
            used.map(|(_, variable)| module.types[variable.ty].inner.size(module.to_ctx()))
        };
        let size = module.entry_points[at].workgroup_size;
        let memory = used(naga::AddressSpace::WorkGroup).sum();
        let bindings = (kernel.inputs + kernel.outputs) as u32;
        let needs = [memory, bindings, size.iter().product(), size[0], MOST_GROUPS];
        for i in 0..needs.len() {
            let (limit, allowed) = NEEDS[i];
            assert!(needs[i] <= allowed, "{}: {limit} of {}", kernel.name, needs[i]);
            most[i] = needs[i].max(most[i]);
        }
        assert!(used(naga::AddressSpace::Uniform).all(|size| size <= 256), "{}", kernel.name);
    }
    assert_eq!(most, NEEDS.map(|(_, allowed)| allowed));
}
