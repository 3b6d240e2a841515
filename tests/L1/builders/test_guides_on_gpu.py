"""The guides of modules and recipes with a GPU, where a dozen CUDA libraries are compiled first."""

import pytest
import test_build_new_module
import test_build_new_recipe
import tutorial


@pytest.mark.cuda
@pytest.mark.parametrize(
    "guide", [test_build_new_module, test_build_new_recipe], ids=["module", "recipe"]
)
def test_guide(guide, tmp_path, monkeypatch):
    """Every command of the page passes."""
    monkeypatch.setattr(tutorial, "LIMIT", 3000)
    guide.follow_page(tmp_path)
