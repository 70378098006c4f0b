// The list of FFI targets and types that an extension offers to Python.
//
// Each handler family (one .cc file in ffi/handlers) has one function, `void
// Register...(Registry&)`, and a module lists the families that it holds. `jax_b12x/_native.py`
// hands the list to JAX, types before targets.
#ifndef JAX_B12X_FFI_REGISTRY_H_
#define JAX_B12X_FFI_REGISTRY_H_

#include <nanobind/nanobind.h>

#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {

// The stages of one target; a null stage is left out.
struct Stages {
  XLA_FFI_Handler* execute = nullptr;
  XLA_FFI_Handler* instantiate = nullptr;
  XLA_FFI_Handler* prepare = nullptr;
  XLA_FFI_Handler* initialize = nullptr;
};

// Collects targets and types as Python dictionaries of capsules, in the form that
// `jax.ffi.register_ffi_target` and `jax.ffi.register_ffi_type` take.
class Registry {
 public:
  void AddTarget(const char* name, const Stages& stages) {
    nanobind::dict capsules;
    AddStage(capsules, "instantiate", stages.instantiate);
    AddStage(capsules, "prepare", stages.prepare);
    AddStage(capsules, "initialize", stages.initialize);
    AddStage(capsules, "execute", stages.execute);
    targets_[name] = capsules;
  }

  // Adds the state type `T` under `name`. `T` has a `static XLA_FFI_TypeId id` that the runtime
  // fills in.
  template <typename T>
  void AddType(const char* name) {
    static constexpr XLA_FFI_TypeInfo kInfo = xla::ffi::MakeTypeInfo<T>();
    nanobind::dict capsules;
    capsules["type_id"] = nanobind::capsule(static_cast<void*>(&T::id));
    capsules["type_info"] = nanobind::capsule(static_cast<const void*>(&kInfo));
    types_[name] = capsules;
  }

  nanobind::dict targets() const { return targets_; }
  nanobind::dict types() const { return types_; }

 private:
  static void AddStage(nanobind::dict& capsules, const char* stage, XLA_FFI_Handler* handler) {
    if (handler != nullptr) {
      capsules[stage] = nanobind::capsule(reinterpret_cast<void*>(handler));
    }
  }

  nanobind::dict targets_;
  nanobind::dict types_;
};

// Gives `module` the function that `_native.py` reads the list with.
inline void ExportRegistry(nanobind::module_& module, void (*fill)(Registry&)) {
  module.def("ffi_registry", [fill]() {
    Registry registry;
    fill(registry);
    return nanobind::make_tuple(registry.targets(), registry.types());
  });
}

}  // namespace b12x::ffi

#endif  // JAX_B12X_FFI_REGISTRY_H_
