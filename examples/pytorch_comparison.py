"""The PyTorch half of compare_methods.py: a model with one method, step by step."""

import horovod.torch as hvd
import pytorch_training as training
import reporting
import torch
import torch.nn.functional as F
from pytorch_digits import Net, as_batch
from reporting import MIN_NUMEL, DenseStats


class Trainer:
    """One model, its optimizer and its compressor."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = Net()
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        self.parameters = training.count_parameters(self.model)
        self.large = sum(p.numel() for p in self.model.parameters() if p.numel() >= MIN_NUMEL)

    @staticmethod
    def start(process_sets):
        """Start Horovod; return rank and number of ranks."""
        hvd.init(process_sets=process_sets)
        return hvd.rank(), hvd.size()

    def compress(self, method, settings, lr, momentum):
        """Choose the compressor, by the name of its method, and make the optimizer."""
        compression = reporting.choose_compression(
            hvd, "hvd_sparse.torch", method, self.model.named_parameters(), settings
        )
        self.stats = getattr(compression, "stats", DenseStats(self.parameters, method).stats)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=momentum)
        named = self.model.named_parameters()
        self.optimizer = hvd.DistributedOptimizer(optimizer, named, compression=compression)

    def first_gradient(self, images, labels):
        """Return the large tensors' gradients before any training, of the mean over the ranks' batches."""
        loss = self._loss(images, labels)
        gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        return [hvd.allreduce(g).numpy() for g in gradients if g.numel() >= MIN_NUMEL]

    def step(self, images, labels, rate):
        """Take a training step; return the loss, and how many elements of the large sums over ranks are not zero."""
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        loss = self._loss(images, labels)
        loss.backward()
        self.optimizer.synchronize()
        large = (p.grad for p in self.model.parameters() if p.numel() >= MIN_NUMEL)
        union = sum(int(torch.count_nonzero(gradient)) for gradient in large)
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        return loss.item(), union

    def mean(self, number):
        """Return the mean of a number over the ranks."""
        return hvd.allreduce(torch.tensor(number, dtype=torch.float64), name="mean").item()

    def evaluate(self, images, labels):
        """Return the summed loss and the number of right answers over the whole test set."""
        self.model.eval()
        images, labels = as_batch(images, labels, "cpu")
        with torch.no_grad():
            output = self.model(images)
        loss = F.cross_entropy(output, labels, reduction="sum").item()
        return loss, int((output.argmax(1) == labels).sum())

    def _loss(self, images, labels):
        images, labels = as_batch(images, labels, "cpu")
        return F.cross_entropy(self.model(images), labels)
