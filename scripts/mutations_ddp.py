"""Faults that the tests of DistributedDataParallel find. The fields are those of `mutations.Mutation`."""

DDP = [
    (
        "a parameter that was not used counts as used, DDP",
        "hvd_sparse/torch/ddp.py",
        "if name not in self._used} if self._leaves_out()",
        "if name not in self._used} if False",
        "ddp test_ddp_conservation still_has",
    ),
    (
        "a parameter without a gradient sends its residual",
        "hvd_sparse/torch/own_loop.py",
        "                missing.add(name)\n",
        "",
        "ddp test_own_loop keeps_its_residual",
    ),
    (
        "a layer that DDP does not reduce trains alone",
        "hvd_sparse/torch/ddp.py",
        "own = self._used - self._reduced if self._reduced else ()",
        "own = ()",
        "ddp test_ddp_refused unfrozen",
    ),
    (
        "a compiled step is not checked",
        "hvd_sparse/torch/optimizer_checks.py",
        "torch.compiler.disable(_before_step))",
        "lambda *a: None if torch.compiler.is_compiling() else _before_step(*a))",
        "ddp test_ddp_optimizer compiled",
    ),
    (
        "a gradient of zeros counts as not used, DDP",
        "hvd_sparse/torch/ddp.py",
        "if name not in self._used} if self._leaves_out()",
        "if not self._parameters[name].grad.any()} if self._leaves_out()",
        "ddp test_ddp_conservation zeros_is",
    ),
    (
        "a state that lacks buffers is accepted",
        "hvd_sparse/checkpoint.py",
        'if count < state.get("buffers", 0):',
        "if False:",
        "ddp test_ddp_state",
    ),
    (
        "a step without reduce_gradients is not noticed",
        "hvd_sparse/torch/own_loop_checks.py",
        "is_new = self._first_gradient(own) not in (before, None)",
        "is_new = False",
        "ddp test_own_loop_checks without_a_call",
    ),
    (
        "a grad that no rank computed is overwritten, DDP",
        "hvd_sparse/torch/ddp.py",
        "if arrival.name not in kept and result.data_ptr()",
        "if result.data_ptr()",
        "ddp test_ddp_conservation stays",
    ),
    (
        "a layer that was frozen at register never counts as used",
        "hvd_sparse/torch/ddp.py",
        "for name, parameter in self._parameters.items():\n            if",
        "for name, parameter in [one for one in self._parameters.items() if one[1].requires_grad]:\n            if",
        "ddp test_ddp_conservation frozen_at_register",
    ),
    (
        "ranks do not compare the parameters in dense",
        "hvd_sparse/algorithms/base.py",
        "for name, text in self._described().items()] + dense",
        "for name, text in self._described().items()]",
        "ddp test_ddp_dense_parameters differ",
    ),
]
