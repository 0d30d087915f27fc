// The ops of MXFP8, added to the schemas that Python registers.
#include "common/boxed.h"
#include "fused/plain.h"
#include "mxfp8/ops.h"

STABLE_TORCH_LIBRARY_IMPL(tejit, CPU, library) {
  using namespace tejit::mxfp8;
  library.impl("mxfp8_quantize", TORCH_BOX(&quantize_cpu));
  library.impl("mxfp8_quantize_out", TORCH_BOX(&quantize_out_cpu));
}

STABLE_TORCH_LIBRARY_IMPL(tejit, CUDA, library) {
  using namespace tejit::mxfp8;
  library.impl("mxfp8_quantize", tejit::on_cuda<&quantize_cuda, kQuantizeOp>);
  library.impl("mxfp8_quantize_out", tejit::on_cuda<&quantize_out_cuda, kQuantizeOutOp>);
}

// No tensor among its arguments, so no device either that the dispatcher could see.
STABLE_TORCH_LIBRARY_IMPL(tejit, BackendSelect, library) {
  using namespace tejit::mxfp8;
  library.impl("mxfp8_make_empty", TORCH_BOX(&make_empty));
}

namespace tejit {
namespace fused {

Four quantize_plain_mxfp8(const Tensor& y, const Cast& cast, bool cuda) {
  const auto run = cuda ? mxfp8::quantize_cuda : mxfp8::quantize_cpu;
  return run(y, cast.fp8, cast.rowwise, cast.columnwise, false, cast.flag);
}

}  // namespace fused
}  // namespace tejit
