from __future__ import annotations

from hvdtrain.torch.elastic import state


def test_the_registry_of_handlers_is_replaced_and_can_be_put_back():
    before = state.get_handler_registry()
    entries = list(before)
    mine = [(dict, state.StateHandler), *before]
    try:
        state.set_handler_registry(mine)
        assert state.get_handler_registry() is mine
    finally:
        state.set_handler_registry(before)
    assert state.get_handler_registry() == entries
