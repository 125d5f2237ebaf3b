"""Leave out of what is shown or kept whatever is secret, or says who and where somebody is.

`names` knows which names are a secret's, `secrets` hides values, `machines` hides people and hosts. Whoever writes a
file, a log or a report calls one of the functions here.
"""

from hvdtrain.system.redact.machines import Scrubber as Scrubber
from hvdtrain.system.redact.machines import interface as interface
from hvdtrain.system.redact.names import is_secret as is_secret
from hvdtrain.system.redact.secrets import HIDDEN as HIDDEN
from hvdtrain.system.redact.secrets import document as document
from hvdtrain.system.redact.secrets import strings as strings
from hvdtrain.system.redact.secrets import text as text
from hvdtrain.system.redact.secrets import variables as variables
from hvdtrain.system.redact.secrets import words as words

__all__ = ["HIDDEN", "Scrubber", "document", "interface", "is_secret", "strings", "text", "variables", "words"]
