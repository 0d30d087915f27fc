// The ops of FP8 in blocks of 128, added to the schemas that Python registers.
#include "common/boxed.h"
#include "fp8_block/ops.h"
#include "fused/plain.h"

STABLE_TORCH_LIBRARY_IMPL(tejit, CPU, library) {
  using namespace tejit::fp8_block;
  library.impl("fp8_block_quantize", TORCH_BOX(&quantize_cpu));
  library.impl("fp8_block_quantize_out", TORCH_BOX(&quantize_out_cpu));
}

STABLE_TORCH_LIBRARY_IMPL(tejit, CUDA, library) {
  using namespace tejit::fp8_block;
  library.impl("fp8_block_quantize", tejit::on_cuda<&quantize_cuda, kQuantizeOp>);
  library.impl("fp8_block_quantize_out", tejit::on_cuda<&quantize_out_cuda, kQuantizeOutOp>);
}

// No tensor among its arguments, so no device either that the dispatcher could see.
STABLE_TORCH_LIBRARY_IMPL(tejit, BackendSelect, library) {
  using namespace tejit::fp8_block;
  library.impl("fp8_block_make_empty", TORCH_BOX(&make_empty));
}

namespace tejit {
namespace fused {

Four quantize_plain_blocks(const Tensor& y, const Cast& cast, bool cuda) {
  const auto run = cuda ? fp8_block::quantize_cuda : fp8_block::quantize_cpu;
  return run(y, cast.fp8, 1, cast.rowwise, cast.columnwise, cast.flag, cast.floor);
}

}  // namespace fused
}  // namespace tejit
