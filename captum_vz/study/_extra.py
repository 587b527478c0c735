"""What studies need of the extra `study`; `compare` and the examples do without."""

try:
    import pandas as pd
    import pyarrow as pa
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list, parse_flag_from_env
    from pyarrow import parquet
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"run_study needs {error.name}, which comes with the extra 'study': pip install \"captum-vz[study]\"",
        name=error.name,
    ) from error

__all__ = ["PartialState", "broadcast_object_list", "pa", "parquet", "parse_flag_from_env", "pd"]
