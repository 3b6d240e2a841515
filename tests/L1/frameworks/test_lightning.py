"""Lightning's TransformerEnginePrecision: the plugin and its strings, Trainer and Fabric, files."""

import copy

import pytest
import torch
from pins import pin
from tiny import STEPS, VOCABULARY, check_losses, sequences

pytest.importorskip("lightning", minversion=pin("lightning"))

import lightning
import transformer_engine.pytorch as te
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision.transformer_engine import _TRANSFORMER_ENGINE_AVAILABLE
from lightning.fabric.plugins.precision.transformer_engine import (
    TransformerEnginePrecision as FabricPrecision,
)
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import TransformerEnginePrecision

from apex_te import recipe as native
from apex_te.ops.gemm_common import fp8_gemm_count

WIDTH = 64
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def network():
    """Returns a model that predicts a sequence's next element from the two before it."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(2 * VOCABULARY, WIDTH),
        torch.nn.LayerNorm(WIDTH),
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()),
        torch.nn.Linear(WIDTH, VOCABULARY),
    )


def te_network():
    """Returns the same model of Transformer Engine's layers, with arguments of their own."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Flatten(),
        te.Linear(2 * VOCABULARY, WIDTH, bias=False),
        te.LayerNormMLP(WIDTH, 2 * WIDTH, zero_centered_gamma=True),
        te.Linear(WIDTH, VOCABULARY),
    )


def data(batches=STEPS):
    """Returns batches of pairs of elements, one-hot, with the element that follows."""
    rows = sequences(8 * STEPS).unfold(1, 3, 3).flatten(0, 1)[: 64 * batches]
    pairs = torch.nn.functional.one_hot(rows[:, :2], VOCABULARY).float()
    return torch.utils.data.DataLoader(list(zip(pairs, rows[:, 2], strict=True)), batch_size=64)


class Module(LightningModule):
    """A network with its loss, for Trainer; ``late`` makes it in ``configure_model``."""

    def __init__(self, make=network, late=False):
        super().__init__()
        self.make, self.losses = make, []
        self.net = None if late else make()

    def configure_model(self):
        if self.net is None:
            self.net = self.make()

    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]).float(), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def trainer(folder, precision=None, steps=STEPS, **options):
    if isinstance(precision, TransformerEnginePrecision):
        options["plugins"] = precision
    elif precision is not None:
        options["precision"] = precision
    return Trainer(
        accelerator="cpu", max_steps=steps, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, **options,
    )  # fmt: skip


def plain_losses(folder, make=network):
    module = Module(make)
    trainer(folder, "32-true", enable_checkpointing=False).fit(module, data())
    return module.losses


def test_availability():
    assert bool(_TRANSFORMER_ENGINE_AVAILABLE), str(_TRANSFORMER_ENGINE_AVAILABLE)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "transformer-engine"])
def test_trainer_converts_and_learns(precision, tmp_path):
    chosen = precision
    if precision != "transformer-engine":
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        chosen = TransformerEnginePrecision(weights_dtype=dtype)
    module, values = Module(), network().state_dict()
    before = fp8_gemm_count()
    trainer(tmp_path, chosen, enable_checkpointing=False).fit(module, data())
    assert fp8_gemm_count() > before
    kinds = [type(m) for m in module.net.modules()]
    assert kinds.count(te.Linear) == 3
    assert kinds.count(te.LayerNorm) == 1
    assert torch.nn.Linear not in kinds
    weights = module.net[1].weight
    assert weights.dtype is (torch.float32 if precision == "fp32" else torch.bfloat16)
    assert not torch.equal(weights.float(), values["1.weight"])
    plain = plain_losses(tmp_path)
    check_losses(module.losses, plain)
    assert abs(module.losses[0] - plain[0]) < 0.05, "the layers kept their initial values"


def test_fabric_learns():
    fabric = Fabric(
        accelerator="cpu", devices=1, plugins=FabricPrecision(weights_dtype=torch.float32)
    )
    losses = []
    for given in (fabric, Fabric(accelerator="cpu", devices=1)):
        model = network()
        model = given.setup_module(model)  # which makes other parameters
        optimizer = given.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-3))
        losses.append([])
        for x, y in data():
            loss = torch.nn.functional.cross_entropy(model(x), y)
            given.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    check_losses(*losses)


def test_the_recipe_of_the_plugin_counts():
    options = {"fp8_format": "E4M3", "amax_history_len": 4, "amax_compute_algo": "most_recent"}
    fabric = Fabric(
        accelerator="cpu", devices=1,
        plugins=FabricPrecision(weights_dtype=torch.float32, recipe=options),
    )  # fmt: skip
    model = fabric.setup_module(network())
    model(next(iter(data()))[0]).sum().backward()
    assert model.module[1]._fp8.state.recipe == native.DelayedScaling(
        fp8_format=native.Format.E4M3, amax_history_len=4, amax_compute_algo="most_recent"
    )


def test_layers_of_transformer_engine_keep_their_arguments(tmp_path):
    module = Module(te_network)
    layers = list(module.net.modules())
    precision = TransformerEnginePrecision(weights_dtype=torch.float32)
    trainer(tmp_path, precision, enable_checkpointing=False).fit(module, data())
    assert [id(m) for m in module.net.modules()] == [id(m) for m in layers]
    assert module.net[2].zero_centered_gamma
    check_losses(module.losses, plain_losses(tmp_path, te_network))


def test_init_module_makes_layers_of_transformer_engine():
    precision = FabricPrecision(weights_dtype=torch.float32, replace_layers=True)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=precision)
    plain = torch.nn.Linear
    with fabric.init_module():
        # Lightning puts te.Linear in the place of torch.nn.Linear, which te.Linear must not call.
        made = network()
        layer = te.LayerNormLinear(32, 32)
    assert torch.nn.Linear is plain
    assert type(made[1]) is te.Linear
    assert type(made[2]) is te.LayerNorm
    assert isinstance(layer, te.LayerNormLinear)
    model = fabric.setup_module(made)
    model(next(iter(data()))[0]).sum().backward()
    assert made[1].weight.grad is not None


def test_training_goes_on_from_a_checkpoint(tmp_path):
    def fit(start=None):
        module = Module(te_network, late=True)
        precision = TransformerEnginePrecision(weights_dtype=torch.float32)
        saver = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=STEPS // 2)
        given = trainer(tmp_path, precision, callbacks=[saver])
        batches = data(STEPS // 2)  # two epochs; within one Lightning begins the data anew
        given.fit(module, batches, ckpt_path=start, weights_only=False)
        return module

    whole = fit()
    resumed = fit(str(tmp_path / f"step={STEPS // 2}.ckpt"))
    assert resumed.losses == whole.losses[STEPS // 2 :]


def test_a_checkpoint_of_converted_layers_loads_without_their_fp8_state(tmp_path):
    module = Module()
    given = trainer(tmp_path, TransformerEnginePrecision(weights_dtype=torch.float32))
    given.fit(module, data())
    path = tmp_path / "end.ckpt"
    given.save_checkpoint(path)
    # Lightning converts a model after it has loaded it, with Transformer Engine as well.
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict.*_extra_state"):
        Module.load_from_checkpoint(path, weights_only=False)
    loaded = Module.load_from_checkpoint(path, strict=False, weights_only=False)
    assert type(loaded.net[1]) is torch.nn.Linear
    x = next(iter(data()))[0]
    with torch.no_grad():
        assert torch.allclose(loaded.net(x), copy.deepcopy(module.net).eval()(x), atol=1e-5)
    assert lightning.__version__
