export const TEXT = "The model is loaded when this text has a vector.";
