"""What the metrics need of the extra `study`; the rest of the package does without."""

try:
    from scipy import stats
    from sklearn.metrics import average_precision_score
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"captum_vz.metrics needs {error.name}, which comes with the extra 'study': pip install \"captum-vz[study]\"",
        name=error.name,
    ) from error

__all__ = ["average_precision_score", "stats"]
