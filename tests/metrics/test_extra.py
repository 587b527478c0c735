"""scipy and scikit-learn are an extra, and whoever lacks it is told so."""

import importlib
import sys

import pytest

from captum_vz.metrics import _study


@pytest.mark.parametrize("missing", ["scipy", "sklearn"])
def test_a_missing_library_is_named_with_the_extra_it_comes_with(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == missing or name.startswith(f"{missing}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)  # an import of it fails now
    monkeypatch.delitem(sys.modules, _study.__name__)
    told = rf"metrics needs {missing}.* comes with the extra 'study': pip install \"captum-vz\[study\]\""
    with pytest.raises(ModuleNotFoundError, match=told):
        importlib.import_module(_study.__name__)
