// The ops of NVFP4, added to the schemas that Python registers.
#include "common/boxed.h"
#include "nvfp4/ops.h"

STABLE_TORCH_LIBRARY_IMPL(tejit, CPU, library) {
  using namespace tejit::nvfp4;
  library.impl("nvfp4_quantize", TORCH_BOX(&quantize<false>));
  library.impl("nvfp4_quantize_out", TORCH_BOX(&quantize_out<false>));
  library.impl("nvfp4_amax", TORCH_BOX(&amax<false>));
}

STABLE_TORCH_LIBRARY_IMPL(tejit, CUDA, library) {
  using namespace tejit::nvfp4;
  library.impl("nvfp4_quantize", tejit::on_cuda<&quantize<true>, kQuantizeOp>);
  library.impl("nvfp4_quantize_out", tejit::on_cuda<&quantize_out<true>, kQuantizeOutOp>);
  library.impl("nvfp4_amax", tejit::on_cuda<&amax<true>, kAmaxOp>);
}

// No tensor among its arguments, so no device either that the dispatcher could see.
STABLE_TORCH_LIBRARY_IMPL(tejit, BackendSelect, library) {
  using namespace tejit::nvfp4;
  library.impl("nvfp4_make_empty", TORCH_BOX(&make_empty));
}
