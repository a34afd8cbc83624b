"""A PyTorch model with gradients that a test chooses."""

import torch


class Terms(torch.nn.Module):
    """Parameters by name. The gradient of each parameter is the argument of `forward` with its name; others are unused.

    values: {name: array}. dtype: of all parameters, or {name: dtype}.
    """

    def __init__(self, values, dtype=torch.float32):
        super().__init__()
        self.names = {name: name.replace(".", "_") for name in values}
        for name, own_name in self.names.items():
            own_dtype = dtype[name] if isinstance(dtype, dict) else dtype
            self.register_parameter(own_name, torch.nn.Parameter(torch.tensor(values[name]).to(own_dtype)))

    def forward(self, gradients):
        terms = [
            (self[name].double() * torch.as_tensor(gradient, dtype=torch.float64, device=self[name].device)).sum()
            for name, gradient in gradients.items()
        ]
        return torch.stack(terms).sum()

    def __getitem__(self, name):
        return getattr(self, self.names[name])

    def named(self):
        """Return the (name, parameter) pairs."""
        return [(name, self[name]) for name in self.names]
