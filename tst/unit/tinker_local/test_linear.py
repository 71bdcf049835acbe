import pytest
import torch

from tinker_local import linear
from tinker_local.linear import PackedLinear, pack_linears


def network(*, bias: bool) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(48, 64, bias=bias), torch.nn.Tanh(), torch.nn.Linear(64, 16, bias=bias))


@pytest.mark.parametrize("shape", [(1, 48), (1, 7, 48), (300, 48), (0, 48)])
@pytest.mark.parametrize("bias", [True, False])
def test_without_gradients_a_packed_layer_gives_what_a_plain_one_gives(shape: tuple[int, ...], bias: bool) -> None:
    plain, packed = network(bias=bias), network(bias=bias)
    pack_linears(packed)
    rows = torch.randn(shape)
    with torch.inference_mode():
        torch.testing.assert_close(packed(rows), plain(rows))
        torch.testing.assert_close(packed(rows.mT.contiguous().mT), plain(rows))


def test_with_gradients_it_is_a_plain_layer_that_holds_no_second_copy() -> None:
    plain, packed = network(bias=True), network(bias=True)
    pack_linears(packed)
    rows = torch.randn(5, 48, requires_grad=True)
    with torch.inference_mode():
        packed(rows.detach())
    layer = packed[0]
    assert isinstance(layer, PackedLinear)
    assert layer._packed is not None

    [expected] = torch.autograd.grad(plain(rows).sum(), [rows])
    [found] = torch.autograd.grad(packed(rows).sum(), [rows])

    assert torch.equal(found, expected)
    assert layer._packed is None
    with torch.inference_mode():
        torch.testing.assert_close(packed(rows.detach()), plain(rows.detach()))


def test_other_layers_are_left_as_they_are() -> None:
    class Special(torch.nn.Linear):
        pass

    layers = torch.nn.ModuleList([Special(4, 4), torch.nn.Linear(4, 4, dtype=torch.float64)])
    pack_linears(layers)
    assert [type(layer) for layer in layers] == [Special, torch.nn.Linear]


def test_where_torch_does_not_have_the_operations_layers_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> torch.Tensor:
        raise NotImplementedError("Could not run 'mkldnn::_reorder_linear_weight'")

    monkeypatch.setattr(linear, "_pack", missing)
    layers = network(bias=True)
    pack_linears(layers)
    assert type(layers[0]) is torch.nn.Linear
