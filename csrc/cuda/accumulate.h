// What a gradient does to the memory of one tensor, on a device; see core/accumulate.h.
#pragma once

#include "../core/accumulate.h"
#include "launch.h"
#include "select_state.h"

namespace hvd_sparse {

// Updates the memory in one pass. Sets *finite to false if the gradient was not finite everywhere, and else leaves it.
// What reaches the candidates' bar is gathered, if there are any.
cudaError_t accumulate_launch(const Array& gradient, const AccumulateParams& params, Memory memory, bool* finite,
                              const Candidates& candidates, cudaStream_t stream);

}  // namespace hvd_sparse
