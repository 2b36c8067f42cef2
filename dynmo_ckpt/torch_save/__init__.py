"""Files of ``torch.save``, read and written without torch; no pickle is executed."""
