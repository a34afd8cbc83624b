"""One rank of a synchronous job on a host of the lab: `hosts_job.py` starts it.

    rank_job.py FOLDER SETTINGS

SETTINGS are those of `faults_ranks.torch_job`, as JSON. The rank writes down how it ended, and when.
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from faults_ranks import torch_job

folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK", "0")))
error = ""
try:
    torch_job(rank, None, str(folder), **settings)
except BaseException as raised:
    error = f"{type(raised).__name__}: {raised}"
    raise
finally:
    (folder / f"{rank}.json").write_text(json.dumps({"error": error, "time": time.time()}))
