package wire

import (
	"slices"
	"testing"
)

func TestLists(t *testing.T) {
	for _, c := range []struct{ list, short []int }{
		{nil, nil}, {[]int{}, nil}, {[]int{1}, nil}, {[]int{1, 1, 1}, nil}, {[]int{2}, []int{2}}, {[]int{2, 2}, []int{2}},
		{[]int{0, 0}, []int{0}}, {[]int{1, 2}, []int{1, 2}}, {[]int{2, 2, 1}, []int{2, 2, 1}},
	} {
		short := Shorten(slices.Clone(c.list), 1)
		if !slices.Equal(short, c.short) || !Fits(short, len(c.list)) {
			t.Errorf("%v: %v, want %v", c.list, short, c.short)
		}
		for i, v := range c.list {
			if got := At(short, i, 1); got != v {
				t.Errorf("%v: element %d of %v is %d", c.list, i, short, got)
			}
		}
	}
	if Fits([]int{1, 2}, 3) {
		t.Error("two elements do not fit three checks")
	}
}
