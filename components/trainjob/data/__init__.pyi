from trainjob.data.content import ContentManifest as ContentManifest
from trainjob.data.steps import (
    Exported as Exported,
)
from trainjob.data.steps import (
    Initialized as Initialized,
)
from trainjob.data.steps import (
    export as export,
)
from trainjob.data.steps import (
    initialize as initialize,
)
from trainjob.data.transfer import copy as copy
from trainjob.data.transfer import read_manifest as read_manifest
