package wire

// At is what a list of a CheckStream message says of check i: the list has an element for each check; or one, which stands
// for all; or none, which stands for the default. i must be an element of a list that has several.
func At[T any](list []T, i int, otherwise T) T {
	switch len(list) {
	case 0:
		return otherwise
	case 1:
		return list[0]
	}
	return list[i]
}

// Shorten returns a list that has an element for each check in as few elements as will do.
func Shorten[T comparable](list []T, otherwise T) []T {
	for _, v := range list {
		if v != list[0] {
			return list
		}
	}
	if len(list) == 0 || list[0] == otherwise {
		return list[:0]
	}
	return list[:1]
}

// Fits says whether a list is as long as one of n checks may be.
func Fits[T any](list []T, n int) bool { return len(list) <= 1 || len(list) == n }
