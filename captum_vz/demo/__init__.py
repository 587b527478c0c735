"""A page in the browser that explains texts: `captum-vz demo`. It needs the extra `demo`."""

from captum_vz.demo.server import serve

__all__ = ["serve"]
