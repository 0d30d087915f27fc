// The ops of activations, added to the schemas that Python registers.
#include "common/boxed.h"
#include "activation/ops.h"

STABLE_TORCH_LIBRARY_IMPL(tejit, CPU, library) {
  using namespace tejit::activation;
  library.impl("activation", TORCH_BOX(&activate<false>));
  library.impl("activation_quantize", TORCH_BOX(&activation_quantize<false>));
}

STABLE_TORCH_LIBRARY_IMPL(tejit, CUDA, library) {
  using namespace tejit::activation;
  library.impl("activation", tejit::on_cuda<&activate<true>, kActivationOp>);
  library.impl("activation_quantize", tejit::on_cuda<&activation_quantize<true>, kQuantizeOp>);
}
