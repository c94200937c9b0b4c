"""The command line: fit a Parquet file, look at the results, predict another file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kingpin_ray._errors import KingpinError, ParameterError

if TYPE_CHECKING:
    from collections.abc import Sequence


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kingpin", description="Train a model for every group of a table."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    fit = commands.add_parser("fit", help="train and store the models of a Parquet file")
    fit.add_argument("data", nargs="+", help="Parquet files, folders or globs")
    fit.add_argument("--by", required=True, help="key column, or several with commas between")
    fit.add_argument("--target", required=True, help="column to predict")
    fit.add_argument("--features", help="columns to learn from, with commas between")
    fit.add_argument("--model", default="linear", help="a name that `kingpin models` lists")
    fit.add_argument("--params", default="{}", help="parameters of the model, as JSON")
    fit.add_argument("--grid", type=Path, help="JSON file: lists of values by parameter")
    fit.add_argument("--n-iter", type=int, help="settings to draw from the grid at random")
    fit.add_argument("--cv", type=float, help="folds, or the share of rows to hold out")
    fit.add_argument("--scoring", help="a scikit-learn scoring name")
    fit.add_argument("--min-rows", type=int, default=2)
    fit.add_argument("--on-bad", default="fallback", choices=["fallback", "skip", "raise"])
    fit.add_argument("--plan", default="auto", help="auto, local, task, data or grouped")
    fit.add_argument("--actors", type=int, help="Ray actors; else one for each free CPU")
    fit.add_argument("--seed", type=int, default=0)
    fit.add_argument("--out", type=Path, required=True, help="new folder for the models")
    fit.add_argument("--resume", action="store_true", help="go on with an unfinished --out")
    fit.set_defaults(run=_fit)

    results = commands.add_parser("results", help="show or export the results of a store")
    results.add_argument("store", type=Path)
    results.add_argument("--out", type=Path, help="write all rows to this Parquet or CSV file")
    results.add_argument("--worst", type=int, default=10, help="how many groups to show")
    results.set_defaults(run=_results)

    report = commands.add_parser("report", help="write a page or a picture about a store")
    report.add_argument("store", type=Path)
    report.add_argument("--out", type=Path, required=True, help="file ending in .html or .png")
    report.add_argument("--worst", type=int, default=15, help="how many groups to name")
    report.set_defaults(run=_report)

    predict = commands.add_parser("predict", help="predict the rows of a Parquet file")
    predict.add_argument("store", type=Path)
    predict.add_argument("data", nargs="+", help="Parquet files, folders or globs")
    predict.add_argument("--out", type=Path, required=True, help="Parquet file for the predictions")
    predict.add_argument("--proba", action="store_true", help="probabilities instead of classes")
    predict.set_defaults(run=_predict)

    models = commands.add_parser("models", help="list the installed kinds of model")
    models.set_defaults(run=_models)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status: 0, or 1 after one line on standard error."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except KingpinError as error:
        print(f"kingpin: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"kingpin: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    return 0


def _fit(args: argparse.Namespace) -> None:
    from kingpin_ray import GroupedEstimator, models

    kind, params = models.get(args.model), _json(args.params, "--params")
    if not isinstance(params, dict):
        raise ParameterError(f"--params {args.params}: give a JSON object of parameters by name")
    try:
        model = kind(**params)
    except TypeError as error:
        raise ParameterError(f"--params {args.params}: {args.model}: {error}") from error
    by = args.by.split(",")
    grid = None
    if args.grid is not None:
        try:
            text = args.grid.read_text(encoding="utf-8")
        except OSError as error:
            raise ParameterError(f"--grid {args.grid}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ParameterError(f"--grid {args.grid}: this is not UTF-8 text: {error}") from error
        grid = _json(text, "--grid")
    whole = args.cv is not None and args.cv >= 2 and args.cv.is_integer()
    estimator = GroupedEstimator(
        model,
        by=by if len(by) > 1 else by[0],
        target=args.target,
        features=args.features.split(",") if args.features else None,
        param_grid=grid,
        cv=int(args.cv) if whole else args.cv,
        scoring=args.scoring,
        min_rows=args.min_rows,
        on_bad=args.on_bad,
        plan=args.plan,
        store=None if args.resume else args.out,
        num_actors=args.actors,
        random_state=args.seed,
        n_iter=args.n_iter,
    )
    if args.resume:
        estimator.resume(args.out, args.data)
    else:
        estimator.fit(args.data)
    _summary(estimator)
    print(f"models are in {args.out}")


def _results(args: argparse.Namespace) -> None:
    from kingpin_ray._result_table import final_rows
    from kingpin_ray._store import Store

    store = Store(args.store)
    if not store.manifest()["complete"]:
        raise ParameterError(f"{args.store} is of an unfinished run; `kingpin fit --resume` it")
    table = store.results()
    if args.worst < 1:
        raise ParameterError(f"--worst {args.worst}: give a number of at least 1")
    if args.out is not None:
        if args.out.suffix == ".csv":
            import pyarrow.csv as writer

            writer.write_csv(table, str(args.out))
        else:
            import pyarrow.parquet as parquet

            parquet.write_table(table, str(args.out))
        print(f"{table.num_rows} rows written to {args.out}")
        return
    final = final_rows(table).sort_by([("score", "ascending")])
    stop = final.schema.get_field_index("config")
    shown = [*final.column_names[:stop], "params", "status", "n_rows", "score"]
    print(" | ".join(shown))
    for row in final.select(shown).slice(0, args.worst).to_pylist():
        print(" | ".join(f"{v:.4f}" if isinstance(v, float) else str(v) for v in row.values()))


def _report(args: argparse.Namespace) -> None:
    from kingpin_ray._report import write_report
    from kingpin_ray._scoring import scorer
    from kingpin_ray._store import Store

    store = Store(args.store)
    manifest = store.manifest()
    if not manifest["complete"]:
        raise ParameterError(f"{args.store} is of an unfinished run; `kingpin fit --resume` it")
    name, _ = scorer(manifest["estimator"]["scoring"], manifest["has_classes"])
    about = write_report(store.results(), name, args.out, args.worst)
    print(
        f"{about['groups']:.0f} groups, {about['bad_groups']:.0f} bad; mean {name} "
        f"{about['mean_score_by_rows']:.4f} over rows, {about['mean_score_by_groups']:.4f} over "
        f"groups; written to {args.out}"
    )


def _predict(args: argparse.Namespace) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    from kingpin_ray import GroupedEstimator
    from kingpin_ray._source import read_paths

    estimator = GroupedEstimator.load(args.store)
    rows = read_paths(args.data, None)
    keys = list(estimator.by) if isinstance(estimator.by, list) else [estimator.by]
    columns: dict[str, Any] = {name: rows.column(name) for name in keys}
    if args.proba:
        if not hasattr(estimator, "predict_proba"):
            raise ParameterError(f"--proba: {args.store} holds regressors; leave the option out")
        proba = estimator.predict_proba(rows)
        for j, label in enumerate(estimator.classes_):
            columns[f"proba_{label}"] = proba[:, j]
    else:
        columns["prediction"] = pa.array(estimator.predict(rows))
    parquet.write_table(pa.table(columns), str(args.out))
    print(f"{rows.num_rows} predictions written to {args.out}")


def _models(args: argparse.Namespace) -> None:
    from kingpin_ray import models

    print("\n".join(models.available()))


def _summary(estimator: Any) -> None:
    from kingpin_ray._result_table import bad_groups

    table, counts = bad_groups(estimator.results_)
    total = sum(counts.values())
    parts = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    print(f"{total} groups ({parts}), plan {estimator.plan_}")
    for row in table.slice(0, 5).to_pylist():
        *key, error = row.values()
        print(f"  {key[0] if len(key) == 1 else tuple(key)}: {error}")
    if table.num_rows > 5:
        print(f"  and {table.num_rows - 5} more bad groups; `kingpin results` lists them")


def _json(text: str, option: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ParameterError(f"{option}: this is not JSON: {error}") from error
    if not isinstance(value, (dict, list)):
        raise ParameterError(f"{option}: give a JSON object, not {value!r}")
    return value
