"""stub"""
from tests.cluster.api import Api
from tests.cluster.components import Layout


class RealNode:
    def __init__(self, layout: Layout, api: Api) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...


def unfit() -> str:
    return "not yet"
