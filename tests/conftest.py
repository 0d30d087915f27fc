import pytest, torch, os


@pytest.fixture
def need_kernels():
    from tejit import jit

    def need(device):
        if not jit.is_loaded():
            pytest.skip("x")
        if device == "cuda" and not torch.cuda.is_available():
            pytest.skip("no gpu")

    return need


def pytest_collection_modifyitems(config, items):
    for i in items:
        if i.get_closest_marker("gpu"):
            i.add_marker(pytest.mark.skip("gpu"))
