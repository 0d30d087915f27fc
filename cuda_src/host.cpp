// The one unit of the host part: adds the CPU and CUDA kernels to ops whose schemas Python registers, and the
// C functions through which tejit/jit tells it of architecture parts. Loads without CUDA, without a driver,
// in every torch from 2.11 on.
#include <unistd.h>

#include "activation/ops.h"
#include "common/boxed.h"
#include "common/error.h"
#include "common/parts.h"
#include "fp8/delayed_ops.h"
#include "fp8/ops.h"
#include "fp8_block/ops.h"
#include "mxfp8/ops.h"
#include "norm/ops.h"
#include "nvfp4/ops.h"

STABLE_TORCH_LIBRARY_IMPL(tejit, CPU, library) {
  using namespace tejit::fp8;
  library.impl("fp8_amax", TORCH_BOX(&amax_cpu));
  library.impl("fp8_scale", TORCH_BOX(&scale_cpu));
  library.impl("fp8_quantize_current", TORCH_BOX(&quantize_cpu));
  library.impl("fp8_quantize_current_out", TORCH_BOX(&quantize_out_cpu));
  library.impl("fp8_quantize_delayed", TORCH_BOX(&quantize_delayed_cpu));
  library.impl("fp8_quantize_delayed_out", TORCH_BOX(&quantize_delayed_out_cpu));
  library.impl("fp8_block_quantize", TORCH_BOX(&tejit::fp8_block::quantize_cpu));
  library.impl("fp8_block_quantize_out", TORCH_BOX(&tejit::fp8_block::quantize_out_cpu));
  library.impl("mxfp8_quantize", TORCH_BOX(&tejit::mxfp8::quantize_cpu));
  library.impl("mxfp8_quantize_out", TORCH_BOX(&tejit::mxfp8::quantize_out_cpu));
  library.impl("nvfp4_quantize", TORCH_BOX(&tejit::nvfp4::quantize<false>));
  library.impl("nvfp4_quantize_out", TORCH_BOX(&tejit::nvfp4::quantize_out<false>));
  library.impl("nvfp4_amax", TORCH_BOX(&tejit::nvfp4::amax<false>));
  library.impl("activation", TORCH_BOX(&tejit::activation::activate<false>));
  library.impl("activation_quantize", TORCH_BOX(&tejit::activation::activation_quantize<false>));
  library.impl("norm", TORCH_BOX(&tejit::norm::norm<false>));
  library.impl("norm_quantize", TORCH_BOX(&tejit::norm::norm_quantize<false>));
}

STABLE_TORCH_LIBRARY_IMPL(tejit, CUDA, library) {
  using namespace tejit::fp8;
  using tejit::on_cuda;
  library.impl("fp8_amax", on_cuda<&amax_cuda, kAmaxOp>);
  library.impl("fp8_scale", on_cuda<&scale_cuda, kScaleOp>);
  library.impl("fp8_quantize_current", on_cuda<&quantize_cuda, kQuantizeOp>);
  library.impl("fp8_quantize_current_out", on_cuda<&quantize_out_cuda, kQuantizeOutOp>);
  library.impl("fp8_quantize_delayed", on_cuda<&quantize_delayed_cuda, kDelayedOp>);
  library.impl("fp8_quantize_delayed_out", on_cuda<&quantize_delayed_out_cuda, kDelayedOutOp>);
  namespace block = tejit::fp8_block;
  library.impl("fp8_block_quantize", on_cuda<&block::quantize_cuda, block::kQuantizeOp>);
  library.impl("fp8_block_quantize_out", on_cuda<&block::quantize_out_cuda, block::kQuantizeOutOp>);
  namespace mx = tejit::mxfp8;
  library.impl("mxfp8_quantize", on_cuda<&mx::quantize_cuda, mx::kQuantizeOp>);
  library.impl("mxfp8_quantize_out", on_cuda<&mx::quantize_out_cuda, mx::kQuantizeOutOp>);
  namespace nvfp4 = tejit::nvfp4;
  library.impl("nvfp4_quantize", on_cuda<&nvfp4::quantize<true>, nvfp4::kQuantizeOp>);
  library.impl("nvfp4_quantize_out", on_cuda<&nvfp4::quantize_out<true>, nvfp4::kQuantizeOutOp>);
  library.impl("nvfp4_amax", on_cuda<&nvfp4::amax<true>, nvfp4::kAmaxOp>);
  namespace activation = tejit::activation;
  library.impl("activation", on_cuda<&activation::activate<true>, activation::kActivationOp>);
  library.impl("activation_quantize",
               on_cuda<&activation::activation_quantize<true>, activation::kQuantizeOp>);
  namespace norm = tejit::norm;
  library.impl("norm", on_cuda<&norm::norm<true>, norm::kNormOp>);
  library.impl("norm_quantize", on_cuda<&norm::norm_quantize<true>, norm::kQuantizeOp>);
}

// No tensor among its arguments, so no device either that the dispatcher could see.
STABLE_TORCH_LIBRARY_IMPL(tejit, BackendSelect, library) {
  library.impl("fp8_make_empty", TORCH_BOX(&tejit::fp8::make_empty));
  library.impl("fp8_block_make_empty", TORCH_BOX(&tejit::fp8_block::make_empty));
  library.impl("mxfp8_make_empty", TORCH_BOX(&tejit::mxfp8::make_empty));
  library.impl("nvfp4_make_empty", TORCH_BOX(&tejit::nvfp4::make_empty));
}

#define TEJIT_EXPORT extern "C" __attribute__((visibility("default")))

TEJIT_EXPORT int tejit_abi(void) {
  return 1;
}

TEJIT_EXPORT const char* tejit_last_error(void) {
  return tejit::last_error().c_str();
}

// Remembers the path only: no file is opened and no CUDA context made before the first op on such a device.
TEJIT_EXPORT int tejit_register_part(int cc, const char* path, int kind) {
  const auto refuse = [](const std::string& why) {
    tejit::last_error() = why;
    return 1;
  };
  try {
    if (kind != 0 && kind != 1) {
      return refuse(tejit::text("tejit_register_part: kind is ", kind,
                                ", but 0 (shared object) or 1 (cubin) is needed"));
    }
    if (cc < 10) {
      return refuse(
          tejit::text("tejit_register_part: cc is ", cc,
                      ", but 10 * major + minor of a compute capability is needed, for example 90"));
    }
    if (path == nullptr || access(path, R_OK) != 0) {
      return refuse(tejit::text("tejit_register_part: ", path ? path : "(null)",
                                " cannot be read; the path of a built part is needed"));
    }
    tejit::Parts::of_process().add(cc, path, static_cast<tejit::PartKind>(kind));
    tejit::last_error().clear();
    return 0;
  } catch (const std::exception& error) {
    return refuse(error.what());
  }
}

TEJIT_EXPORT void tejit_set_part_callback(int (*callback)(int cc)) {
  tejit::Parts::of_process().set_callback(callback);
}
