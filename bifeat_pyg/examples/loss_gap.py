"""Shows how the loss reached on packed features approaches that of fp32 as the bits grow.

BiFeat states that training on quantized features converges to a loss within an epsilon of the
optimum on the features as they are. Here that is a figure: a model with one optimum (logistic
regression on features averaged over two hops, with weight decay, so the loss is strictly convex) is
trained to convergence by L-BFGS on each, and the loss of the weights found on packed features is
taken on the fp32 features, where its least value is known.

    python loss_gap.py
    python loss_gap.py --plot gap.png

The cells marked %% open as a notebook in editors that know them. Needs scikit-learn beside
bifeat-pyg, and matplotlib for the plot.
"""

# %% What is trained on

import argparse
from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph
from torch import Tensor
from torch_geometric.data import Data

from bifeat_pyg import SQ, VQ, quantize


def digits() -> tuple[Data, Tensor]:
    """Returns the digits as a graph, and the matrix that averages over two hops of it."""
    pixels, labels = load_digits(return_X_y=True)
    near = torch.tensor(kneighbors_graph(pixels, 8, include_self=True).toarray())
    mean = near / near.sum(1, keepdim=True)
    data = Data(x=torch.tensor(pixels / 16, dtype=torch.float32), y=torch.tensor(labels))
    return data, mean @ mean


# %% A loss with one optimum, and how it is found


def loss(weights: Tensor, features: Tensor, labels: Tensor, decay: float) -> Tensor:
    """Returns cross entropy plus decay, a strictly convex function of the weights."""
    scores = features @ weights
    return torch.nn.functional.cross_entropy(scores, labels) + decay * weights.square().sum()


def optimum(features: Tensor, labels: Tensor, decay: float) -> Tensor:
    """Returns the weights of least loss, float64 [D + 1, classes]."""
    weights = torch.zeros(features.shape[1], 10, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS(
        [weights], max_iter=2000, tolerance_grad=1e-10, tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        solver.zero_grad()
        value = loss(weights, features, labels, decay)
        value.backward()
        return value

    solver.step(closure)
    return weights.detach()


# %% The same on packed features, and what that costs on the features as they are


def gaps(decay: float = 1e-3) -> Iterator[tuple[str, float, float]]:
    """Yields quantizer, relative error of the features and gap of the loss, each as it is found."""
    data, smooth = digits()

    def prepared(x: Tensor) -> Tensor:
        ones = torch.ones(len(x), 1, dtype=torch.float64)
        return torch.cat((smooth @ x.double(), ones), dim=1)

    true = prepared(data.x)
    least = loss(optimum(true, data.y, decay), true, data.y, decay)
    specs = {f"{b} bit": SQ(b) for b in (1, 2, 4, 8, 16)} | {"VQ 8x256": VQ(8, 256)}
    for name, spec in specs.items():
        packed = quantize(data, spec=spec)
        x = packed.x_codec.decode(packed.x)
        weights = optimum(prepared(x), data.y, decay)
        gap = float(loss(weights, true, data.y, decay) - least)
        yield name, float((x - data.x).norm() / data.x.norm()), gap


# %% The figures


def plot(found: list[tuple[str, float, float]], path: str) -> None:
    """Draws the gap over the error of the features, both on logarithmic scales."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, error, gap in found:
        axes.loglog(error, max(gap, 1e-16), "o", color="tab:red" if "VQ" in name else "tab:blue")
        axes.annotate(name, (error, max(gap, 1e-16)), textcoords="offset points", xytext=(6, -3))
    axes.set_xlabel("relative error of the features")
    axes.set_ylabel("loss above the optimum")
    axes.margins(0.2)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Prints the gaps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plot", help="also draw them, into this PNG or SVG")
    options = parser.parse_args()
    print("quantizer   error of features   loss above the optimum", flush=True)
    found = []
    for name, error, gap in gaps():
        print(f"{name:10}  {error:17.4f}   {gap:.2e}", flush=True)
        found.append((name, error, gap))
    if options.plot is not None:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
