"""A job that ends well."""

from matplotlib.figure import Figure

from ci.demo.job import Measure, Progress, Result, main


def run(progress: Progress) -> Result:
    progress("half way")
    figure = Figure()
    figure.subplots().plot([0, 1], [1, 0])
    return Result(
        data="two points <of> 1 & 0",
        without="2 bytes",
        with_plugin="1 byte",
        measures=[Measure("size", 2, 1, "bytes")],
        caption="A falling line.",
        figure=figure,
    )


if __name__ == "__main__":
    main(run)
