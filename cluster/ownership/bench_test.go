package ownership

import (
	"fmt"
	"testing"
	"time"
)

// BenchmarkTick is what an idle node's core costs, a hundred times a second.
func BenchmarkTick(b *testing.B) {
	for _, voters := range []int{0, 3} {
		b.Run(fmt.Sprintf("voters=%d", voters), func(b *testing.B) {
			w := newTown(nil, 1, 4093, []string{"a", "b", "c"}[:voters]...)
			for _, name := range []string{"a", "b", "c"} {
				w.start(name)
			}
			w.views()
			w.run(8*time.Second, nil)
			n := w.nodes["a"]
			b.ResetTimer()
			for b.Loop() {
				w.now += int64(10 * time.Millisecond)
				n.core.Tick(w.time())
				n.core.Take()
			}
		})
	}
}
