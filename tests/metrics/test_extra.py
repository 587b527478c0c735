"""scipy and scikit-learn are an extra. The error of a missing one names the extra."""

import importlib
import sys

import pytest


@pytest.mark.parametrize(("missing", "module"), [("scipy", "intervals"), ("sklearn", "probing")])
def test_missing_library_names_the_extra(missing: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == missing or name.startswith(f"{missing}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)  # an import of it fails now
    module = f"captum_vz.metrics.{module}"
    monkeypatch.setattr(module, importlib.import_module(module))
    monkeypatch.delitem(sys.modules, module)
    told = rf"metrics needs {missing}.* comes with the extra 'study': pip install \"captum-vz\[study\]\""
    with pytest.raises(ModuleNotFoundError, match=told):
        importlib.import_module(module)
