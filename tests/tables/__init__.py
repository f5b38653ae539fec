"""Tables from which tests are made: operators by opset, operands, element types, exceptions with their reasons."""
