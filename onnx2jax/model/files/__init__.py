"""Files: saving models with new weights, joining two models, exporting programs and loading them."""
