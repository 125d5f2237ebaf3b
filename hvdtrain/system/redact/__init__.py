"""Remove secrets, and names of users and hosts, from text that is shown or saved.

`names` knows the names of secrets, `secrets` hides values, `machines` hides users and hosts. Code that writes a file, a
log or a report calls one of the functions here.
"""

from hvdtrain.system.redact.machines import Scrubber, interface
from hvdtrain.system.redact.names import is_secret
from hvdtrain.system.redact.secrets import HIDDEN, document, strings, text, variables, words

__all__ = ["HIDDEN", "Scrubber", "document", "interface", "is_secret", "strings", "text", "variables", "words"]
