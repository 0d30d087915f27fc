// The ops of norms, added to the schemas that Python registers.
#include "common/boxed.h"
#include "norm/ops.h"

STABLE_TORCH_LIBRARY_IMPL(tejit, CPU, library) {
  using namespace tejit::norm;
  library.impl("norm", TORCH_BOX(&norm<false>));
  library.impl("norm_quantize", TORCH_BOX(&norm_quantize<false>));
}

STABLE_TORCH_LIBRARY_IMPL(tejit, CUDA, library) {
  using namespace tejit::norm;
  library.impl("norm", tejit::on_cuda<&norm<true>, kNormOp>);
  library.impl("norm_quantize", tejit::on_cuda<&norm_quantize<true>, kQuantizeOp>);
}
