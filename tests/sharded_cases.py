"""What the processes of tests/test_sharded.py compute: losses of their shards, and what bad arguments get."""

import itertools
import math

import torch
import torch.distributed as dist
from processes import counted

from bitempered.torch import bi_tempered_logistic_loss, linear_bi_tempered_logistic_loss

SIZES = {2: (4, 6), 4: (5, 0, 3, 2)}  # of the shards: one may be empty
CLASSES = 10
# Newton's range and the rounds', both sides of 1, next to it, the ends of the promise on messages, a heavy tail.
PAIRS = [(0.0, 0.0), (0.0, 0.3), (0.5, 0.5), (0.3, 0.8), (0.8, 1.0), (1.0, 1.0), (0.8, 1 + 1e-6)]
PAIRS += [(0.8, 1.2), (1.3, 1.6), (0.5, 4.0), (1.9, 30.0)]
OPTIONS = [
    {},
    {"weight": True},
    {"label_smoothing": 0.1},
    {"reduction": "none", "rescale": True},
    {"weight": True, "label_smoothing": 0.2, "rescale": True},
    {"weight": True, "reduction": "sum", "label_smoothing": 1.0},
]


def shard(x, rank, world, dim):
    sizes = SIZES[world]
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank])


def cases(dtype=torch.float64):
    """(logits, target, t1, t2, options) of every kind, the logits not yet sharded."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.rand(CLASSES, generator=draw, dtype=dtype)
    weight[3] = 0
    scales = itertools.cycle([3.0, 100.0, 0.0, 0.3])  # usual, sure, a new head, unsure
    for ((t1, t2), options), scale in zip(itertools.product(PAIRS, OPTIONS), scales, strict=False):
        logits = scale * torch.randn(6, CLASSES, generator=draw, dtype=dtype)
        logits[1, 2] = logits[5, 4:] = -math.inf  # masked; the last six of ten: whole shards
        logits[2, 3:7] = logits[2].max()  # equal largest logits, on several shards
        index = torch.tensor([0, 9, 4, -100, 6, 1])
        soft = torch.softmax(torch.randn(6, CLASSES, generator=draw, dtype=dtype), 1)
        soft[1, 2] = soft[5, 4:] = 0
        soft /= soft.sum(1, keepdim=True)
        options = options | ({"weight": weight} if "weight" in options else {})
        yield logits, index, t1, t2, options
        yield logits, soft, t1, t2, options
    logits = torch.randn(4, CLASSES, 3, generator=draw, dtype=dtype)
    yield logits, torch.randint(CLASSES, (4, 3), generator=draw), 0.8, 1.2, {"reduction": "none"}  # pixels
    yield logits, logits.softmax(1), 0.8, 1.2, {}
    yield logits[0, :, 0], torch.tensor(7), 0.8, 1.2, {}  # one example
    yield logits[:0], torch.zeros(0, 3, dtype=torch.long), 0.8, 1.2, {"reduction": "sum"}  # none
    yield logits[..., 0], torch.full((4,), -100), 0.8, 1.2, {}  # all ignored: NaN, and a gradient of 0
    yield logits[..., 0], torch.full((4,), 8), 0.8, 1.2, {"ignore_index": 8, "reduction": "sum"}
    for bad in (math.nan, math.inf):
        broken = logits[..., 0].clone()
        broken[1, 6] = bad
        yield broken, torch.tensor([1, 2, 3, 4]), 0.8, 1.2, {"reduction": "none"}


def axis_of(logits):
    return min(1, logits.dim() - 1)


def gradients_of_case(loss, logits, target, t1, t2, options):
    logits = logits.clone().requires_grad_()
    value = loss(logits, target, t1, t2, **options)
    value.sum().backward()
    return value.detach(), logits.grad


def losses(rank, world, dtype):
    found = []
    for logits, target, t1, t2, options in cases(dtype):
        axis = axis_of(logits)
        own = shard(logits, rank, world, axis)
        of_target = shard(target, rank, world, axis) if target.is_floating_point() else target
        with counted() as messages:
            result = gradients_of_case(
                bi_tempered_logistic_loss, own, of_target, t1, t2, options | {"group": dist.group.WORLD}
            )
        found.append((*result, messages.sizes))
    return found


def derivative_cases():
    draw = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(5, CLASSES, generator=draw, dtype=torch.float64)
    t1 = torch.rand(5, generator=draw, dtype=torch.float64)
    t2 = 1 + t1 * torch.tensor([-0.3, 0.1, 0.5, 3.0, 0.0], dtype=torch.float64)
    soft = torch.softmax(torch.randn(5, CLASSES, generator=draw, dtype=torch.float64), 1)
    weight = torch.rand(CLASSES, generator=draw, dtype=torch.float64)
    for target in (torch.tensor([0, 3, 6, 9, 4]), soft):
        for options in ({}, {"weight": weight, "label_smoothing": 0.1}, {"rescale": True, "reduction": "none"}):
            yield logits, target, torch.minimum(t1, t2), t2, options


def leaves(logits, target, t1, t2):
    """Copies that need gradients; class indices have none."""
    found = [x.detach().clone() for x in (logits, target, t1, t2)]
    return [x.requires_grad_() if x.is_floating_point() else x for x in found]


def gradients_of_all(loss, logits, target, t1, t2, options):
    inputs = leaves(logits, target, t1, t2)
    value = loss(*inputs, **options)
    value.sum().backward()
    return value.detach(), *(x.grad for x in inputs)


def all_gradients(rank, world):
    found = []
    for logits, target, t1, t2, options in derivative_cases():
        own = shard(logits, rank, world, 1)
        of_target = shard(target, rank, world, 1) if target.is_floating_point() else target
        options = options | {"group": dist.group.WORLD}
        found.append(gradients_of_all(bi_tempered_logistic_loss, own, of_target, t1, t2, options))
    return found


def linear_cases():
    draw = torch.Generator().manual_seed(2)
    n, features = 700, 5  # three chunks of rows
    hidden = torch.randn(n, features, generator=draw, dtype=torch.float64)
    weight = torch.randn(CLASSES, features, generator=draw, dtype=torch.float64)
    bias = torch.randn(CLASSES, generator=draw, dtype=torch.float64)
    index = torch.randint(CLASSES, (n,), generator=draw)
    index[::7] = -100
    soft = torch.softmax(torch.randn(n, CLASSES, generator=draw, dtype=torch.float64), 1)
    class_weight = torch.rand(CLASSES, generator=draw, dtype=torch.float64)
    for target in (index, soft):
        yield hidden, weight, bias, target, {}
        yield hidden, weight, bias, target, {"reduction": "none", "class_weight": class_weight}
        yield hidden, weight, None, target, {"reduction": "sum", "label_smoothing": 0.1, "softcap": 2.0}
        yield hidden, weight, bias, target, {"class_weight": class_weight, "rescale": True, "label_smoothing": 0.1}
    yield hidden.reshape(7, 100, features), weight, bias, index.reshape(7, 100), {"reduction": "none"}


def linear_gradients(hidden, weight, bias, target, options):
    inputs = [None if x is None else x.detach().clone().requires_grad_() for x in (hidden, weight, bias)]
    value = linear_bi_tempered_logistic_loss(inputs[0], inputs[1], target, 0.8, 1.2, bias=inputs[2], **options)
    (value * torch.arange(1.0, 1 + value.numel()).reshape(value.shape)).sum().backward()
    return value.detach(), *(None if x is None else x.grad for x in inputs)


def linear_losses(rank, world):
    found = []
    for hidden, weight, bias, target, options in linear_cases():
        own = [None if x is None else shard(x, rank, world, 0) for x in (weight, bias)]
        of_target = shard(target, rank, world, -1) if target.is_floating_point() else target
        found.append(linear_gradients(hidden, *own, of_target, options | {"group": dist.group.WORLD}))
    return found


def distributed_tensors(rank, world):
    """Losses and gradients of DTensors, whole again."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    meshes = [(init_device_mesh("cpu", (world,)), [Shard(1)])]
    if world == 4:
        meshes.append((init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(1)]))
    found = []
    for mesh, placements in meshes:
        for logits, target, t1, t2, options in derivative_cases():
            t1, t2 = t1[0].item(), t2[0].item()
            leaf = distribute_tensor(logits, mesh, placements).requires_grad_()
            soft = target.is_floating_point()
            of_target = distribute_tensor(target, mesh, placements) if soft else target
            value = bi_tempered_logistic_loss(leaf, of_target, t1, t2, **options)
            value.sum().backward()
            found.append(
                (value.full_tensor().detach(), leaf.grad.full_tensor(), leaf.grad.placements == leaf.placements)
            )
    return found


def messages_in_float32(rank, world):
    """(t2, classes, sizes of the messages, loss, gradient) for hard logits of many classes, and what all have alike."""
    found = []
    for logits, target, t2, options in float32_cases():
        own = logits.chunk(world, 1)[rank]
        of_target = target.chunk(world, 1)[rank] if target.is_floating_point() else target
        options = options | {"group": dist.group.WORLD}
        with counted() as messages:
            result = gradients_of_case(bi_tempered_logistic_loss, own, of_target, min(t2, 0.8), t2, options)
        found.append((*result, messages.sizes))
    return found


def float32_cases():
    draw = torch.Generator().manual_seed(3)
    for t2 in (0.5, 0.6, 0.8, 0.99, 1.0, 1.01, 1.2, 1.5, 2.0, 3.0, 4.0):
        for scale in (0.0, 0.5, 5.0, 300.0):
            logits = scale * torch.randn(4, 1000, generator=draw)
            soft = torch.softmax(torch.randn(4, 1000, generator=draw), 1)
            weight = torch.rand(1000, generator=draw)
            yield logits, torch.tensor([1, 400, 700, 999]), t2, {"reduction": "none"}
            yield logits, soft, t2, {"reduction": "none", "weight": weight, "label_smoothing": 0.1, "rescale": True}


def halves(rank, world):
    found = []
    for logits, target, options in half_cases():
        own = logits.chunk(world, 1)[rank]
        found.append(
            gradients_of_case(bi_tempered_logistic_loss, own, target, 0.8, 1.2, options | {"group": dist.group.WORLD})
        )
    return found


def half_cases():
    draw = torch.Generator().manual_seed(4)
    for dtype in (torch.float16, torch.bfloat16):
        logits = (4 * torch.randn(8, 100, generator=draw)).to(dtype)
        yield logits, torch.randint(100, (8,), generator=draw), {"reduction": "none"}
        yield logits, torch.randint(100, (8,), generator=draw), {"rescale": True, "label_smoothing": 0.1}


def said(function):
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return None, "nothing was raised"


def mistakes(rank, world):
    """What this process raises, by the name of the mistake. After each one the group still works."""
    group, first = dist.group.WORLD, rank == 0
    logits = torch.randn(4, 3)
    index = torch.tensor([0, 1, 2, 3])
    soft = torch.full((4, 3), 1 / (3 * world))

    def loss(a=logits, y=index, t1=0.8, t2=1.2, **options):
        return bi_tempered_logistic_loss(a, y, t1, t2, **{"group": group} | options)

    def linear(hidden, weight, **options):
        return linear_bi_tempered_logistic_loss(hidden, weight, index, 0.8, 1.2, **{"group": group} | options)

    hidden = torch.randn(4, 2)
    lonely = dist.new_group([0])
    wrong = {
        "rows": lambda: loss(logits[:3] if first else logits, index[:3] if first else index),
        "targets' shape on one rank": lambda: loss(y=index[:3] if first else index),
        "targets' values": lambda: loss(y=index if first else index.flip(0)),
        "targets' kind": lambda: loss(y=index if first else soft),
        "dtype": lambda: loss(logits.double() if first else logits),
        "temperature": lambda: loss(t2=1.3 if first else 1.2),
        "option": lambda: loss(label_smoothing=0.1 if first else 0.0),
        "bad temperature on one rank": lambda: loss(t2=0.5 if first else 1.2),
        "bad index": lambda: loss(y=index + 3 * world),
        "weight is a shard": lambda: loss(weight=torch.ones(3)),
        "weights' values": lambda: loss(weight=torch.full((3 * world,), 1.0 + rank)),
        "negative weight": lambda: loss(weight=-torch.ones(3 * world)),
        "sum of probabilities": lambda: loss(y=2 * soft),
        "negative probability on one rank": lambda: loss(y=soft - first * 1.0),
        "not a tensor": lambda: loss([1.0] if first else logits),
        "no classes at all": lambda: loss(torch.randn(4, 0)),
        "not a group": lambda: loss(group="world"),
        "not a member": lambda: loss(group=lonely) if not first else loss(group="world"),
        "second derivative": lambda: torch.autograd.grad(
            *((x := logits.clone().requires_grad_()) is not None and (loss(x), x)), create_graph=True
        ),
        "vmap": lambda: torch.vmap(lambda a, y: loss(a, y))(logits[None], index[None]),
        "jvp": lambda: torch.func.jvp(loss, (logits,), (logits,)),
        "forward mode": lambda: forward_mode(loss, logits),
        "compile": lambda: torch.compile(loss, backend="eager", fullgraph=True)(logits),
        "hidden rows": lambda: linear(hidden[:3] if first else hidden, torch.randn(3, 2)),
        "hidden features on one rank": lambda: linear(hidden, torch.randn(3, 3 if first else 2)),
        "hidden needs a gradient on one rank": lambda: linear(hidden.clone().requires_grad_(first), torch.randn(3, 2)),
    }
    found = {name: said(function) for name, function in wrong.items()}
    found["afterwards"] = loss().item()
    return found


def forward_mode(loss, logits):
    with torch.autograd.forward_ad.dual_level():
        return loss(torch.autograd.forward_ad.make_dual(logits, logits))


def everything(rank, world):
    return {
        "losses": losses(rank, world, torch.float64),
        "all_gradients": all_gradients(rank, world),
        "linear": linear_losses(rank, world),
        "dtensors": distributed_tensors(rank, world),
        "float32": messages_in_float32(rank, world),
        "halves": halves(rank, world),
        "mistakes": mistakes(rank, world),
    }
