// How an op's CUDA kernel meets the dispatcher: with a part for the tensor's device it runs, without one the
// op's overload `reference` takes the call over with the stack as it came.
#pragma once

#include "common/parts.h"
#include "common/tensor.h"

namespace tejit {

template <typename Function>
struct Arguments;

template <typename Result, typename... Parameters>
struct Arguments<Result (*)(Parameters...)> {
  // The stack owns what it holds; whoever does not pass it on must take it off.
  static void release(StableIValue* stack) {
    torch::stable::detail::unbox_to_tuple<torch::stable::detail::unbox_type_t<Parameters>...>(stack);
  }
};

// Every CUDA op has a tensor as its first argument. Where that is not a CUDA tensor, another argument brought
// the call here, and the op itself says so.
inline bool reference_must_run(const StableIValue* stack) {
  const Device device = device_of(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
  return device.is_cuda() && Parts::of_process().find(device_facts(device.index).cc) == nullptr;
}

template <auto kFunction, const char* kName>
void on_cuda(StableIValue* stack, std::uint64_t inputs, std::uint64_t outputs) {
  bool reference = false;
  try {
    reference = reference_must_run(stack);
  } catch (...) {
    Arguments<decltype(kFunction)>::release(stack);
    throw;
  }
  if (!reference) {
    torch::stable::detail::boxer<std::remove_pointer_t<decltype(kFunction)>, kFunction>::boxed_fn(
        stack, inputs, outputs);
  } else if (torch_call_dispatcher(kName, "reference", stack, TORCH_ABI_VERSION) != TORCH_SUCCESS) {
    fail(kName, ": its reference failed: ", torch_reason());
  }
}

}  // namespace tejit
