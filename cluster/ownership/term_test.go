package ownership

import "testing"

func TestTermOrder(t *testing.T) {
	rising := []Term{{}, {N: 1}, {N: 1 << 63}, {Epoch: 1}, {Epoch: 1, N: 7}, {Epoch: 2}, {Epoch: 1 << 63}}
	for i, a := range rising {
		for j, b := range rising {
			want := 0
			if i < j {
				want = -1
			} else if i > j {
				want = 1
			}
			if got := a.Compare(b); got != want {
				t.Errorf("%v compared with %v: %d, want %d", a, b, got, want)
			}
			if a.Less(b) != (i < j) {
				t.Errorf("%v less than %v: %v", a, b, a.Less(b))
			}
		}
	}
	if got := (Term{Epoch: 3, N: 14}).String(); got != "3.14" {
		t.Errorf("String: %q", got)
	}
}
