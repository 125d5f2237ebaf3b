"""When an optimizer's step is fused, what comes out, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from hvdtrain.torch import adapter
from hvdtrain.torch.reduction import fused_update

SHAPES = ((37, 5), (3,), ())
KINDS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2, "nesterov": True}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    (Adam, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    (Adam, {"lr": 0.01, "amsgrad": True}),
    (AdamW, {"lr": 0.01}),
]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the fused kernels that were called."""
    called: list[str] = []

    def spied(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def spy(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return kernel(*args, **kwargs)

        return spy

    for name in ("_fused_sgd_", "_fused_adam_", "_fused_adamw_"):
        monkeypatch.setattr(torch, name, spied(name, getattr(torch, name)))
    return called


def parameters(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    torch.manual_seed(0)
    return [Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def give_gradients(params: list[Parameter], step: int) -> None:
    torch.manual_seed(100 + step)
    for param in params:
        param.grad = torch.randn(param.shape).to(param.dtype)


def train(optimizer: Optimizer, params: list[Parameter], *, chosen: bool, steps: int = 5) -> None:
    for step in range(steps):
        give_gradients(params, step)
        if chosen:
            with fused_update.chosen(optimizer):
                optimizer.step()
        else:
            optimizer.step()


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_fused_step_is_the_users_to_rounding(
    kind: type[Optimizer], options: dict[str, Any], dtype: torch.dtype, kernels: list[str]
) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizer, plain = kind(ours, **options), kind(theirs, **options)
    train(plain, theirs, chosen=False)
    assert not kernels
    train(optimizer, ours, chosen=True)
    assert len(kernels) == 5
    near = 1e-6 if dtype is torch.float32 else 1e-14
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=near, atol=near)
        for name, value in plain.state[other].items():
            torch.testing.assert_close(optimizer.state[mine][name], value, rtol=near, atol=near)
    assert optimizer.state_dict()["param_groups"] == plain.state_dict()["param_groups"]


@pytest.mark.parametrize(("kind", "options"), [KINDS[1], KINDS[4], KINDS[5]])
def test_a_backward_pass_through_weights_that_a_step_changed_raises(
    kind: type[Optimizer], options: dict[str, Any], kernels: list[str]
) -> None:
    layer = torch.nn.Linear(1, 1)
    outputs = layer(torch.ones(1, 1, requires_grad=True))
    stale = outputs.square().sum()
    outputs.sum().backward(retain_graph=True)
    with fused_update.chosen(optimizer := kind(layer.parameters(), **options)):
        optimizer.step()
    assert len(kernels) == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_groups_are_the_users_again_after_a_step_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the kernel's")

    monkeypatch.setattr(torch, "_fused_sgd_", fails)
    params = parameters()
    optimizer = SGD(params, lr=0.1)
    before = deepcopy(optimizer.state_dict())
    with pytest.raises(RuntimeError, match="the kernel's"):
        train(optimizer, params, chosen=True, steps=1)
    assert optimizer.state_dict() == before
    assert not optimizer._optimizer_step_pre_hooks


def test_a_hook_that_one_rank_has_changes_nothing(kernels: list[str]) -> None:
    params = parameters()
    optimizer = SGD(params, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    train(optimizer, params, chosen=True, steps=1)
    assert kernels == ["_fused_sgd_"]


def test_a_step_with_a_closure_is_the_users(kernels: list[str]) -> None:
    params = parameters()
    optimizer = SGD(params, lr=0.1)

    def closure() -> float:
        give_gradients(params, 0)
        return 0.0

    for given in ((closure,), ()):
        with fused_update.chosen(optimizer):
            optimizer.step(*given, **({} if given else {"closure": closure}))
    assert not kernels


def _sparse(params: list[Parameter], _: Optimizer) -> None:
    params[0].grad = torch.eye(37)[:, :5].to_sparse()


def _strided(params: list[Parameter], _: Optimizer) -> None:
    assert params[0].grad is not None
    params[0].grad = params[0].grad.t().contiguous().t()


def _momentum_on_some(params: list[Parameter], optimizer: Optimizer) -> None:
    optimizer.state[params[0]]["momentum_buffer"] = torch.ones_like(params[0])


def _strided_momentum(params: list[Parameter], optimizer: Optimizer) -> None:
    for param in params:
        optimizer.state[param]["momentum_buffer"] = torch.randn_like(param)
    optimizer.state[params[0]]["momentum_buffer"] = torch.randn(5, 37).t()


def _hooked(params: list[Parameter], optimizer: Optimizer) -> None:
    optimizer.register_step_pre_hook(lambda *_: _strided(params, optimizer))


@pytest.mark.parametrize("change", [_sparse, _strided, _momentum_on_some, _strided_momentum, _hooked])
def test_what_the_kernels_would_misread_takes_the_users_step(
    change: Callable[[list[Parameter], Optimizer], None], kernels: list[str]
) -> None:
    results = []
    for chosen in (True, False):
        params = parameters()
        optimizer = SGD(params, lr=0.1, momentum=0.9)
        give_gradients(params, 0)
        torch.manual_seed(7)
        change(params, optimizer)
        if chosen:
            with fused_update.chosen(optimizer):
                optimizer.step()
        else:
            optimizer.step()
        results.append(params)
    assert not kernels
    assert all(torch.equal(mine, other) for mine, other in zip(*results, strict=True))


def test_a_step_count_of_another_type_takes_the_users_step(kernels: list[str]) -> None:
    params = parameters()
    optimizer = Adam(params, lr=0.1)
    train(optimizer, params, chosen=True, steps=1)
    for state in optimizer.state.values():
        state["step"] = state["step"].double()  # from a run whose default type was float64
    train(optimizer, params, chosen=True, steps=1)
    assert len(kernels) == 1


@pytest.mark.parametrize(
    "options",
    [{"fused": False}, {"foreach": True}, {"foreach": False}, {"differentiable": True}, {"lr": torch.tensor(0.1)}],
)
def test_a_choice_of_the_users_stays(options: dict[str, Any], kernels: list[str]) -> None:
    params = parameters()
    optimizer = SGD(params, **{"lr": 0.1, **options})
    for param in params:
        param.requires_grad_(not options.get("differentiable", False))
    train(optimizer, params, chosen=True, steps=1)
    assert not kernels
    assert optimizer.param_groups[0]["fused"] is options.get("fused")


def test_the_users_fused_step_stays_fused(kernels: list[str]) -> None:
    params = parameters()
    optimizer = SGD(params, lr=0.1, fused=True)
    train(optimizer, params, chosen=True, steps=1)
    assert kernels == ["_fused_sgd_"]
    assert optimizer.param_groups[0]["fused"] is True


def test_half_precision_takes_the_users_step(kernels: list[str]) -> None:
    params = parameters(torch.bfloat16)
    train(SGD(params, lr=0.1), params, chosen=True, steps=1)
    assert not kernels


def test_groups_are_looked_at_one_by_one(kernels: list[str]) -> None:
    half, whole = parameters(torch.bfloat16), parameters()
    optimizer = SGD([{"params": half}, {"params": whole}], lr=0.1)
    give_gradients(half, 0)
    train(optimizer, whole, chosen=True, steps=1)
    assert kernels == ["_fused_sgd_"]


@pytest.mark.parametrize("switch", ["1", "0"])
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.01}, {"precision": "fp16"}])
def test_a_trainer_of_one_process_takes_the_steps_of_one_of_ranks(
    make: Any, net: Any, hvd: Any, kernels: list[str], monkeypatch: pytest.MonkeyPatch, switch: str, options: dict
) -> None:
    monkeypatch.setenv("HVDTRAIN_FUSED_UPDATE", switch)
    torch.manual_seed(0)
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    weights = []
    for reduces in (False, True):  # then a DistributedOptimizer is there on one rank too
        answers = SimpleNamespace(reduces_alone=lambda answer=reduces: answer, is_elastic=lambda: False)
        monkeypatch.setattr(adapter, "launch_environment", answers)
        torch.manual_seed(0)
        model = net()
        trainer = make(model, optimizer=Adam(model.parameters(), lr=0.01), **options)
        trainer.fit((x, y), epochs=2, batch_size=4, progress=False)
        assert len(kernels) == (6 if switch == "1" else 0)
        kernels.clear()
        assert {group["fused"] for group in trainer._adapter._update.optimizer.param_groups} == {None}
        weights.append([param.detach() for param in model.parameters()])
    assert all(torch.equal(alone, of_ranks) for alone, of_ranks in zip(*weights, strict=True))


def test_it_applies_to_these_classes_and_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(SGD):
        pass

    assert fused_update.applies_to(SGD)
    assert not fused_update.applies_to(Mine)
    assert not fused_update.applies_to(torch.optim.LBFGS)
    monkeypatch.setenv("HVDTRAIN_FUSED_UPDATE", "0")
    assert not fused_update.applies_to(SGD)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_steps_on_gpus_are_fused_only_on_request(layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_update, "_GPU", "meta")  # which stands for one: no kernel runs here
    params = [Parameter(torch.zeros(shape, device="meta")) for shape in ((4, 3, 5, 5), (4,))]
    params[0].data = params[0].data.to(memory_format=layout)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer = Adam(params, lr=0.1)
    optimizer.step()
    (group,) = optimizer.param_groups
    assert not fused_update._can_be_fused(optimizer, group)
    monkeypatch.setenv("HVDTRAIN_GPU_ASYNC", "1")
    assert fused_update._can_be_fused(optimizer, group)
    assert optimizer.state[params[0]]["step"].is_cpu
    fused_update._move_counts(optimizer, params)
    assert all(state["step"].is_meta for state in optimizer.state.values())
    assert fused_update._can_be_fused(optimizer, group)
    params[0].grad = torch.zeros(5, 5, 3, 4, device="meta").permute(3, 2, 0, 1)
    assert not fused_update._can_be_fused(optimizer, group)
