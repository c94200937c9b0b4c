"""Groups of clients that look alike."""

import numpy as np

_MOST_GROUPS = 4
# Below this mean silhouette there are no groups worth the name.
_CLEAR = 0.35
_MOST_POINTS = 400


def centroids(z_KM: np.ndarray, seed: int = 0) -> tuple[tuple[float, ...], ...]:
    """Centres of the groups in scaled metrics, the largest group first; empty for one group.

    K-means with 2 to 4 groups; the number with the best mean silhouette is taken, if clear.

    Args:
        z_KM: scaled metrics, shape (clients, metrics), finite.
        seed: fixes the starting points, and which clients are looked at where there are many.
    """
    rng = np.random.default_rng((seed, 41))
    if len(z_KM) > _MOST_POINTS:
        z_KM = z_KM[rng.permutation(len(z_KM))[:_MOST_POINTS]]
    distinct = len(np.unique(z_KM, axis=0))
    best = _CLEAR
    found: tuple[tuple[float, ...], ...] = ()
    for count in range(2, min(_MOST_GROUPS, distinct) + 1):
        centres, label_K = _k_means(z_KM, count, rng)
        score = _silhouette(z_KM, label_K, count)
        if score > best:
            order = np.argsort(-np.bincount(label_K, minlength=count), kind="stable")
            best, found = score, tuple(tuple(map(float, centres[g])) for g in order)
    return found


def spread_out(z_KM: np.ndarray, count: int, seed: int = 0) -> tuple[tuple[float, ...], ...]:
    """Centres of at most `count` groups that together cover all rows, clear groups or not."""
    rng = np.random.default_rng((seed, 42))
    if len(z_KM) > _MOST_POINTS:
        z_KM = z_KM[rng.permutation(len(z_KM))[:_MOST_POINTS]]
    distinct = np.unique(z_KM, axis=0)
    if len(distinct) > count:
        distinct, _ = _k_means(z_KM, count, rng)
    return tuple(tuple(map(float, centre)) for centre in distinct)


def nearest(z_KM: np.ndarray, centres: tuple[tuple[float, ...], ...]) -> np.ndarray:
    """The number of the nearest centre for each row, int64 of shape (clients,)."""
    distance = np.linalg.norm(z_KM[:, None] - np.asarray(centres)[None], axis=2)
    return np.asarray(distance.argmin(axis=1))


def _k_means(
    z_KM: np.ndarray, count: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    best = None
    for _ in range(5):
        centres = z_KM[[int(rng.integers(len(z_KM)))]]
        while len(centres) < count:
            # As k-means++ does: far points are likelier to start a group.
            gap = np.linalg.norm(z_KM[:, None] - centres[None], axis=2).min(axis=1) ** 2
            pick = int(rng.choice(len(z_KM), p=gap / gap.sum()))
            centres = np.concatenate([centres, z_KM[[pick]]])
        for _ in range(50):
            label_K = nearest(z_KM, tuple(map(tuple, centres)))
            moved = np.stack(
                [
                    z_KM[label_K == g].mean(axis=0) if (label_K == g).any() else centres[g]
                    for g in range(count)
                ]
            )
            if np.allclose(moved, centres):
                break
            centres = moved
        label_K = nearest(z_KM, tuple(map(tuple, centres)))
        inertia = float(((z_KM - centres[label_K]) ** 2).sum())
        if best is None or inertia < best[0]:
            best = (inertia, centres, label_K)
    assert best is not None
    return best[1], best[2]


def _silhouette(z_KM: np.ndarray, label_K: np.ndarray, count: int) -> float:
    distance = np.linalg.norm(z_KM[:, None] - z_KM[None], axis=2)
    sizes = np.bincount(label_K, minlength=count)
    if (sizes == 0).any():
        return -1.0
    total = np.stack([distance[:, label_K == g].sum(axis=1) for g in range(count)], axis=1)
    rows = np.arange(len(z_KM))
    own = total[rows, label_K] / np.maximum(sizes[label_K] - 1, 1)
    other = total / sizes
    other[rows, label_K] = np.inf
    away = other.min(axis=1)
    score = (away - own) / np.maximum(np.maximum(away, own), 1e-12)
    # A group of one has no inside to compare with.
    return float(np.where(sizes[label_K] > 1, score, 0.0).mean())
