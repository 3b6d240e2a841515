"""Models and training loops of the tests of apex.transformer, which ranks run in processes."""

import torch
from torch import distributed
from torch.nn import functional

from apex_te.integrations.apex.transformer import parallel_state, pipeline_parallel, tensor_parallel
from apex_te.integrations.apex.transformer.layers import FusedLayerNorm
from apex_te.integrations.apex.transformer.pipeline_parallel import utils

STEPS = 12
VOCABULARY, HIDDEN, LENGTH, BATCH = 32, 16, 8, 4


def join(rank, world, path, backend):
    """Begins a process, over NCCL with a GPU of its own."""
    if backend == "nccl":
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    method = f"file://{path}"
    distributed.init_process_group(backend, init_method=method, rank=rank, world_size=world)


def device():
    """Where a process has its tensors."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Block(torch.nn.Module):
    """An embedding, a norm, two linear layers and the loss, split over tensor-parallel ranks."""

    def __init__(self, sequence_parallel):
        super().__init__()
        options = {"use_cpu_initialization": True}
        both = {**options, "sequence_parallel_enabled": sequence_parallel}
        self.sequence_parallel = sequence_parallel
        self.embedding = tensor_parallel.VocabParallelEmbedding(VOCABULARY, HIDDEN, **options)
        self.norm = FusedLayerNorm(HIDDEN, sequence_parallel_enabled=sequence_parallel)
        self.column = tensor_parallel.ColumnParallelLinear(
            HIDDEN, 4 * HIDDEN, gather_output=False, stride=2, **both
        )
        self.row = tensor_parallel.RowParallelLinear(
            4 * HIDDEN, HIDDEN, input_is_parallel=True, stride=2, skip_bias_add=True, **both
        )

    def forward(self, tokens):
        x = self.embedding(tokens.t())
        if self.sequence_parallel:
            x = tensor_parallel.scatter_to_sequence_parallel_region(x)
        y, bias = self.row(functional.gelu(self.column(self.norm(x))[0]))
        x = x + y + bias
        if self.sequence_parallel:
            x = tensor_parallel.gather_from_sequence_parallel_region(x)
        else:
            x = tensor_parallel.copy_to_tensor_model_parallel_region(x)
        logits = functional.linear(x, self.embedding.weight)
        return tensor_parallel.vocab_parallel_cross_entropy(logits[:-1], tokens.t()[1:]).mean()


def train_tensor_parallel(sequence_parallel, fuses=False):
    """Losses of a training, and whole parameters by name."""
    torch.manual_seed(1)
    model = Block(sequence_parallel).to(device())
    model.column.gradient_accumulation_fusion = fuses
    weight = model.column.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    data = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(STEPS):
        begin = torch.randint(VOCABULARY, (BATCH, 1), generator=data)
        tokens = ((begin + torch.arange(LENGTH)) % VOCABULARY).to(device())
        optimizer.zero_grad()
        weight.main_grad = torch.zeros_like(weight) if fuses else None
        loss = model(tokens)
        loss.backward()
        if fuses:
            weight.grad = weight.main_grad
        for param in model.parameters():
            if getattr(param, "sequence_parallel_enabled", False):
                group = parallel_state.get_tensor_model_parallel_group()
                distributed.all_reduce(param.grad, group=group)
        optimizer.step()
        losses.append(loss.detach())
    params = {name: whole(param).cpu() for name, param in model.named_parameters()}
    return torch.stack(losses).cpu(), params


def whole(param):
    """A parameter of all tensor-parallel ranks."""
    if not getattr(param, "tensor_model_parallel", False):
        return param.detach()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(param) for _ in range(ranks)]
    distributed.all_gather(parts, param.detach(), group=group)
    dim, stride = param.partition_dim, param.partition_stride
    pieces = [part.chunk(stride, dim) for part in parts]
    return torch.cat([piece[i] for i in range(stride) for piece in pieces], dim)


class Chunk(torch.nn.Module):
    """Some layers of a chain; the first chunk takes the batch, the others their input."""

    def __init__(self, indices, pre_process, post_process):
        super().__init__()
        self.pre_process, self.post_process = pre_process, post_process
        self.input_tensor = None
        self.layers = torch.nn.ModuleDict()
        for index in indices:
            torch.manual_seed(100 + index)
            self.layers[str(index)] = torch.nn.Linear(HIDDEN, HIDDEN)

    def set_input_tensor(self, tensors):
        (self.input_tensor,) = tensors

    def forward(self, x):
        x = x if self.pre_process else self.input_tensor
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def forward_step(batch, model):
    x, target = batch

    def loss(output):
        value = functional.mse_loss(output, target)
        return value, {"loss": value.detach()}

    return model(x), loss


class Doubling:
    """A loss scaler with a constant scale."""

    @staticmethod
    def scale(loss):
        return 1024.0 * loss


def train_pipeline(layers, virtual=None, microbatches=4, wraps=False, scales=False, **options):
    """Losses of a training, on the last stage, and this rank's parameters by name."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    replicas = parallel_state.get_data_parallel_world_size() if wraps else 1
    utils._GLOBAL_NUM_MICROBATCHES_CALCULATOR = None
    utils.setup_microbatch_calculator(1, None, 2 * microbatches * replicas, 2, replicas)
    count = layers // (stages * (virtual or 1))

    def provide(pre_process, post_process):
        chunk = parallel_state.get_virtual_pipeline_model_parallel_rank() or 0
        first = (chunk * stages + stage) * count
        return Chunk(range(first, first + count), pre_process, post_process)

    chunks = pipeline_parallel.build_model(provide, wraps, virtual)
    params = [param for chunk in chunks for param in chunk.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.5, momentum=0.9)
    step = pipeline_parallel.get_forward_backward_func(virtual, stages)
    data = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(STEPS):
        size = (2 * microbatches * replicas, HIDDEN)
        x = torch.randn(size, generator=data).tanh().to(device())
        target = 0.5 * x
        if wraps:
            mine = slice(parallel_state.get_data_parallel_rank(), None, replicas)
            x, target = x[mine], target[mine]
        optimizer.zero_grad()
        found = step(
            forward_step,
            [x, target],
            chunks,
            forward_only=False,
            tensor_shape=(2, HIDDEN),
            grad_scaler=Doubling() if scales else None,
            **options,
        )
        for param in params:
            if scales:
                param.grad /= 1024.0
        optimizer.step()
        losses += [each["loss"] for each in found]
    evaluated = step(
        forward_step, [x, target], chunks, forward_only=True, tensor_shape=(2, HIDDEN), **options
    )
    losses += [each["loss"] for each in evaluated]
    named = {}
    for chunk in utils.unwrap_model(chunks):
        named |= {name: param.detach().cpu() for name, param in chunk.named_parameters()}
    return torch.stack(losses).cpu() if losses else None, named
