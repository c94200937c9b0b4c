"""The index policy against the exact optimum, and the index against quadrature.

    python3 -m ci bench mlcd_bo/gittins

Boxes: independent, four outcomes each; opening by rising index with its stop against the dynamic
programme that enumerates every order and stop. Baselines: expected improvement per cost, greedy.
"""

import argparse
import json
import platform
from functools import cache
from pathlib import Path

import numpy as np
from scipy import integrate, stats

from mlcd_bo._index import gittins_index

Box = tuple[tuple[float, ...], tuple[float, ...], float]


def boxes_of(rng: np.random.Generator, count: int) -> list[Box]:
    """Returns boxes of discretised lognormal outcomes with costs of their own."""
    found = []
    for _ in range(count):
        values = np.sort(np.exp(rng.normal(0, 0.7, 4)))
        found.append(
            (tuple(values), tuple(rng.dirichlet(np.ones(4))), float(rng.uniform(0.01, 0.25)))
        )
    return found


def index_of(box: Box) -> float:
    """Returns the g with ``E[(g - f)+] = cost`` of one discrete box."""
    values, chances, cost = map(np.array, box)
    low, high = values.min(), values.max() + cost
    for _ in range(90):
        middle = 0.5 * (low + high)
        if (chances * np.maximum(middle - values, 0)).sum() < cost:
            low = middle
        else:
            high = middle
    return float(low)


def best_possible(boxes: list[Box], held: float) -> float:
    """Returns the least expected total over every adaptive policy."""

    @cache
    def value(held: float, closed: tuple[int, ...]) -> float:
        options = [held]
        for i in closed:
            outcomes, chances, cost = boxes[i]
            rest = tuple(j for j in closed if j != i)
            after = (p * value(min(held, v), rest) for v, p in zip(outcomes, chances, strict=True))
            options.append(cost + sum(after))
        return min(options)

    return value(held, tuple(range(len(boxes))))


def of_policy(boxes: list[Box], held: float, choose) -> float:
    """Returns the expected total of a policy ``choose(held, closed) -> box or None``."""

    @cache
    def value(held: float, closed: tuple[int, ...]) -> float:
        i = choose(held, closed)
        if i is None:
            return held
        outcomes, chances, cost = boxes[i]
        rest = tuple(j for j in closed if j != i)
        after = (p * value(min(held, v), rest) for v, p in zip(outcomes, chances, strict=True))
        return cost + sum(after)

    return value(held, tuple(range(len(boxes))))


def main() -> None:
    """Runs both comparisons and prints their tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, default=200)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    losses: dict[str, list[float]] = {"gittins": [], "ei per cost": [], "greedy, no stop": []}
    for _ in range(args.worlds):
        boxes = boxes_of(rng, 4)
        index = [index_of(box) for box in boxes]
        held = 1.5
        best = best_possible(boxes, held)

        def improvement(i: int, held: float, boxes=boxes) -> float:
            values, chances, _ = boxes[i]
            return sum(p * max(held - v, 0) for v, p in zip(values, chances, strict=True))

        def by_index(held: float, closed: tuple[int, ...], index=index) -> int | None:
            if not closed:
                return None
            i = min(closed, key=lambda j: index[j])
            return i if index[i] < held else None

        def per_cost(held: float, closed: tuple[int, ...], boxes=boxes, ei=improvement):
            if not closed:
                return None
            i = max(closed, key=lambda j: ei(j, held) / boxes[j][2])
            return i if ei(i, held) > 0.05 * held else None

        def greedy(held: float, closed: tuple[int, ...], ei=improvement):
            return max(closed, key=lambda j: ei(j, held)) if closed else None

        for name, choose in (
            ("gittins", by_index),
            ("ei per cost", per_cost),
            ("greedy, no stop", greedy),
        ):
            losses[name].append(of_policy(boxes, held, choose) / best - 1)
    errors = []
    for mean in (-3.0, 0.0, 2.0):
        for sd in (0.05, 0.3, 1.0):
            for cost in (1e-4, 1e-2, 1.0):
                g = float(gittins_index(*map(np.array, ([mean], [sd], [cost])))[0])
                top = (np.log(g) - mean) / sd
                worth, _ = integrate.quad(
                    lambda z, g=g, m=mean, s=sd: (g - np.exp(m + s * z)) * stats.norm.pdf(z),
                    min(-10.0, top - 8),
                    min(top, 12.0),
                    epsabs=0,
                    limit=400,
                )
                errors.append(abs(worth / cost - 1))
    print(f"{args.worlds} worlds of 4 boxes; loss against the exact optimum; {platform.machine()}")
    print("| policy | mean loss | largest loss |\n|---|---|---|")
    for name, values in losses.items():
        print(f"| {name} | {np.mean(values):.2%} | {np.max(values):.1e} |")
    print(
        f"index against quadrature, {len(errors)} cases: largest relative error {max(errors):.1e}"
    )
    if args.out:
        args.out.write_text(json.dumps({"losses": losses, "errors": errors}))


if __name__ == "__main__":
    main()
