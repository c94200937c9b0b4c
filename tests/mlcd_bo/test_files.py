import math

import pytest

import mlcd_bo as mlcd
from mlcd_bo._trace import read_traces

HEAD = "job,instance_type,count,runtime_s,price_per_hour,status,speed\n"


def write(tmp_path, text, name="f.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("types: 3", "list 'types'"),
        ("- a", "list 'types'"),
        ("types: [", "not usable YAML"),
        ("types: []", "empty"),
        ("types: [a]", r"types\[0\] must be a mapping"),
        ("types: [{name: a}]", "lacks price"),
        ("types: [{name: a, price: 1, colour: red}]", "unknown fields.*colour"),
        ("types: [{name: a, price: -1}]", "price"),
        ("types: [{name: a, price: .nan}]", "price"),
        ("types: [{name: a, price: 1}, {name: a, price: 2}]", "twice"),
        ("types: [{name: a, price: 1, counts: [0]}]", "counts"),
        ("types: [{name: a, price: 1}]\ncounts: {b: [1]}", "not in the catalogue"),
        ("types: [{name: a, price: 1}]\nnumbers: [1]", "unknown keys"),
        ("types: [{name: a, price: 1, counts: [1]}, {name: b, price: 2}]", "no counts for 'b'"),
        ("types: [{name: a, price: 1}, {name: b, price: 2}]\ncounts: {a: [1]}", "counts for 'b'"),
        ("types: [{name: , price: 1}]\ncounts: [1]", "name must be a non-empty"),
        ("types: [{name: on, price: 1}]\ncounts: [1]", "name must be a non-empty"),
        ('types: [{name: "a\\e", price: 1}]\ncounts: [1]', "printable"),
        ("types: [{name: a, price: 1, price: 9}]", "key 'price' is given twice"),
        ("types: [{name: a, price: 1}]\ntypes: [{name: b, price: 2}]", "key 'types' is given"),
    ],
)
def test_yaml_refused(text, says, tmp_path):
    with pytest.raises(mlcd.CatalogError, match=says):
        mlcd.Catalog.from_yaml(write(tmp_path, text))


def test_yaml_read(tmp_path):
    text = "dated: 2026-01-02\ncounts: [1, 4]\ntypes: [{name: a, price: 1, counts: [2]},"
    text += " {name: b, price: 2, gpus: 8, gpu_name: H200, spot_price: 0.5}]"
    catalog = mlcd.Catalog.from_yaml(write(tmp_path, text))
    assert catalog.dated == "2026-01-02"
    assert [d.key for d in mlcd.SearchSpace(catalog)] == ["a x2", "b x1", "b x4"]
    assert catalog["b"].gpu_name == "H200"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name,cost\na,1\n", "name and price"),
        ("name,price\na,x\n", "line 2: price must be a number"),
        ("name,price\na\n", "line 2"),
        ("name,price\na,1,2\n", "line 2"),
        ("name,price,max_count\na,1,2.5\n", "max_count"),
        ("name,price,colour\na,1,red\n", "unknown fields"),
        ("name,price\n", "empty"),
        ("name,price,price\na,1,2\n", "column 'price' twice"),
    ],
)
def test_csv_refused(text, says, tmp_path):
    with pytest.raises(mlcd.CatalogError, match=says):
        mlcd.Catalog.from_csv(write(tmp_path, text, "f.csv"))


def test_csv_read(tmp_path):
    path = write(tmp_path, "name,price,vcpus,max_count,gpu_name\na,1,2,3,\nb,2.5,,,T4\n", "f.csv")
    catalog = mlcd.Catalog.from_csv(path, counts=[1, 8])
    assert (catalog["a"].vcpus, catalog["a"].max_count, catalog["a"].gpu_name) == (2, 3, None)
    assert [d.key for d in mlcd.SearchSpace(catalog)] == ["a x1", "b x1", "b x8"]
    with pytest.raises(mlcd.CatalogError, match="cannot be read"):
        mlcd.Catalog.from_csv(tmp_path / "no.csv")


def test_aws_is_bundled_with_a_date():
    catalog = mlcd.Catalog.aws()
    assert len(catalog) == 84
    assert catalog.dated == "2024-12, from memory, unchecked"
    four = mlcd.Catalog.aws(["g5.12xlarge"], counts=[1, 2])["g5.12xlarge"]
    assert (four.gpus, four.gpu_name, four.vcpus, four.net_gbps) == (4, "A10G", 48, 40)
    assert all(kind.memory_gib for kind in catalog.values())


def test_aws_with_own_prices_and_described_types(tmp_path):
    prices = write(tmp_path, "# dated: May\nname,price,spot_price\nz1.big,4.0,1.5\n", "p.csv")
    described = [
        {
            "InstanceType": "z1.big",
            "VCpuInfo": {"DefaultVCpus": 64},
            "MemoryInfo": {"SizeInMiB": 262144},
            "NetworkInfo": {"NetworkPerformance": "Up to 25 Gigabit"},
            "GpuInfo": {"Gpus": [{"Name": "Z", "Count": 2, "MemoryInfo": {"SizeInMiB": 40960}}]},
        }
    ]
    catalog = mlcd.Catalog.aws(prices=prices, described=described)
    kind = catalog["z1.big"]
    assert (kind.price, kind.spot_price, kind.mem_gib, kind.memory_gib) == (4.0, 1.5, 256, 80)
    assert (kind.gpus, kind.net_gbps, catalog.dated) == (2, 25.0, "May")
    with pytest.raises(mlcd.CatalogError, match="no price is known"):
        mlcd.Catalog.aws(["m5.large"], prices=prices)
    with pytest.raises(mlcd.CatalogError, match="no size is known"):
        mlcd.Catalog.aws(["z2.big"])
    for text, says in (
        ("name,price\na,1\na,2\n", "two prices for 'a'"),
        ("name,price,price\na,1,2\n", "column 'price' twice"),
    ):
        with pytest.raises(mlcd.CatalogError, match=says):
            mlcd.Catalog.aws(prices=write(tmp_path, text, "twice.csv"))
    with pytest.raises(mlcd.CatalogError, match="DescribeInstanceTypes"):
        mlcd.Catalog.aws(described=[{"InstanceType": "q"}])


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("a,x,1,,1,ok,\n", "line 2: runtime_s and speed are both empty"),
        ("a,x,1,10,,ok,\n", "line 2: price_per_hour is empty"),
        ("a,x,1,10,0,ok,\n", "price"),
        ("a,x,0,10,1,ok,\n", "count must be a whole number"),
        ("a,x,1.5,10,1,ok,\n", "count must be a whole number"),
        ("a,x,one,10,1,ok,\n", "count must be a number"),
        ("a,x,1,ten,1,ok,\n", "runtime_s must be a number"),
        ("a,x,1,0,1,ok,\n", "above 0"),
        ("a,x,1,nan,1,ok,\n", "finite"),
        ("a,x,1,10,1,lost,\n", "status 'lost' is unknown"),
        ("a,x,1,10,1,ok,\na,x,1,11,1,ok,\n", "listed twice"),
        ("a,x,1,10,1,ok,\na,x,2,11,2,ok,\n", "two prices"),
        ("a,x,inf,10,1,ok,\n", "count must be a whole number"),
        ("a,x\n", "line 2: count must be a whole number"),
        ("", "no job"),
    ],
)
def test_traces_refused(rows, says, tmp_path):
    with pytest.raises(mlcd.TraceError, match=says):
        read_traces(write(tmp_path, HEAD + rows, "t.csv"))


def test_traces_without_a_column_or_a_file(tmp_path):
    with pytest.raises(mlcd.TraceError, match="no column runtime_s"):
        read_traces(write(tmp_path, "instance_type,count,price_per_hour\n", "t.csv"))
    with pytest.raises(mlcd.TraceError, match="column 'count' twice"):
        read_traces(write(tmp_path, HEAD.replace("speed", "count"), "t.csv"))
    with pytest.raises(mlcd.TraceError, match="cannot be read"):
        read_traces(tmp_path / "no.csv")


def test_traces_read(tmp_path):
    rows = "a,x,1,10,1,ok,\na,x,2,,1,failed,\na,x,4,600,1,timeout,0.5\na,x,8,600,1,timeout,\n"
    path = write(tmp_path, HEAD + rows + "b,x,1,5,1,,2.0\n", "t.csv")
    traces = read_traces(path)
    cells = {d.key: c for d, c in traces["a"].cells.items()}
    assert cells["x x1"].speed == 0.1
    assert (cells["x x2"].status, math.isnan(cells["x x2"].speed)) == ("oom", True)
    assert (cells["x x4"].status, cells["x x4"].speed) == ("ok", 0.5)
    assert cells["x x8"].status == "timeout"
    assert traces["b"].fastest == 2.0
    with pytest.raises(mlcd.TraceError, match="name one with job="):
        mlcd.TraceProfiler(path)
    with pytest.raises(mlcd.TraceError, match="no job c"):
        mlcd.TraceProfiler(path, "c")
    profiler = mlcd.TraceProfiler(path, "a", noise=0.1, seed=3)
    one = profiler.profile(profiler.space[0], mlcd.Limits())
    assert one == profiler.profile(profiler.space[0], mlcd.Limits())
    assert one.speed != 0.1
    assert one.speed_sem == pytest.approx(0.1 * one.speed)
    assert one.seconds == 200
    assert one.dollars == pytest.approx(200 / 3600)
    assert profiler.profile(profiler.space[1], mlcd.Limits()).status == "oom"
    with pytest.raises(mlcd.TraceError, match="not in the trace"):
        profiler.profile(mlcd.Deployment(mlcd.InstanceType("y", 1.0), 1), mlcd.Limits())
    with pytest.raises(mlcd.InvalidInput, match="noise"):
        mlcd.TraceProfiler(path, "a", noise=-1)


def test_files_as_spreadsheets_write_them(tmp_path):
    path = tmp_path / "prices.csv"
    path.write_bytes(b"\xef\xbb\xbfname,price,quota\r\na,1.5,2.0\r\n")
    assert mlcd.Catalog.from_csv(path)["a"] == mlcd.InstanceType("a", 1.5, quota=2)
    runs = tmp_path / "runs.csv"
    runs.write_bytes(b"\xef\xbb\xbf" + HEAD.encode() + b"j,a,1,100,1,,\n")
    assert list(read_traces(runs)) == ["j"]
    path.write_bytes(b"\xef\xbb\xbfname,price\r\nm5.large,1.5\r\n")
    assert mlcd.Catalog.aws(["m5.large"], prices=path)["m5.large"].price == 1.5


def test_yaml_numbers_that_yaml_takes_for_text(tmp_path):
    text = "types: [{name: 1, price: 1e-3}]\ncounts: {1: [1, 2]}"
    catalog = mlcd.Catalog.from_yaml(write(tmp_path, text))
    assert [d.key for d in mlcd.SearchSpace(catalog)] == ["1 x1", "1 x2"]
    assert catalog["1"].price == 0.001


def test_lines_are_counted_as_an_editor_does(tmp_path):
    path = write(tmp_path, "name,price\nthin,3\n\n\nwide,x\n", "f.csv")
    with pytest.raises(mlcd.CatalogError, match="line 5: price"):
        mlcd.Catalog.from_csv(path)
    path = write(tmp_path, HEAD + "j,a,1,100,1,,\n\n\nj,a,2,x,1,,\n", "g.csv")
    with pytest.raises(mlcd.TraceError, match="line 5: runtime_s"):
        read_traces(path)


def test_a_quote_that_is_never_closed(tmp_path):
    rest = "x" * 200_000
    with pytest.raises(mlcd.CatalogError, match="close every quote"):
        mlcd.Catalog.from_csv(write(tmp_path, f'name,price\n"a,1\n{rest}', "f.csv"))
    with pytest.raises(mlcd.TraceError, match="close every quote"):
        read_traces(write(tmp_path, f'{HEAD}"j,a,1\n{rest}', "g.csv"))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("j,a,1,0,1,,", "runtime_s must be finite and above 0, got 0.0"),
        ("j,a,1,-5,1,,", "runtime_s must be finite and above 0, got -5.0"),
        ("j,a,1,nan,1,,", "runtime_s must be finite and above 0, got nan"),
        ("j,a,1,100,1,timeout,inf", "speed must be finite and above 0, got inf"),
    ],
)
def test_a_trace_cell_that_no_run_can_have(line, says, tmp_path):
    with pytest.raises(mlcd.TraceError, match=says):
        read_traces(write(tmp_path, f"{HEAD}{line}\n", "f.csv"))


def test_a_job_that_never_ran(tmp_path):
    path = write(tmp_path, f"{HEAD}j,a,1,,1,oom,\nj,a,2,,1,error,\n", "f.csv")
    with pytest.raises(mlcd.TraceError, match="job 'j' has no run that gave a speed"):
        mlcd.TraceProfiler(path)


def test_the_speed_of_a_run_that_failed_is_not_looked_at(tmp_path):
    lines = "j,a,1,100,1,,\nj,a,2,,1,oom,0.0\nj,a,4,,1,timeout,0\nj,a,8,50,1,timeout,0.5\n"
    trace = read_traces(write(tmp_path, HEAD + lines, "f.csv"))["j"]
    assert [c.status for c in trace.cells.values()] == ["ok", "oom", "timeout", "ok"]
