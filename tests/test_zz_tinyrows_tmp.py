from tests.test_bench import *
from tests.test_bench import config, _console
from benchmarks import pair_rows
async def test_rows(config):
    outcomes = await run(config, pair_rows.ROWS, QUICK, _console())
    for o in outcomes: print(o.row.name, o.error, o.measurement)
    assert [o.error for o in outcomes] == [""]*len(outcomes)
