package observe

import (
	"testing"

	"github.com/weirlimit/weir/test/expect"
)

// FuzzTraceparent: whatever a header says, its ids are valid or there is no context, and the header that such a context makes is
// read again as the same.
func FuzzTraceparent(f *testing.F) {
	for _, header := range []string{
		"", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
		"ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-ff-more",
		"00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01", "00-", "\xff",
	} {
		f.Add(header)
	}
	f.Fuzz(func(t *testing.T, header string) {
		sc := parentOf(t.Context(), header)
		expect.True(t, sc.HasTraceID() == sc.HasSpanID() && sc.IsValid() == sc.HasTraceID(), "%q: %+v", header, sc)
		if !sc.IsValid() {
			return
		}
		again := parentOf(t.Context(), "00-"+sc.TraceID().String()+"-"+sc.SpanID().String()+"-"+sc.TraceFlags().String())
		expect.True(t, again.TraceID() == sc.TraceID() && again.SpanID() == sc.SpanID() &&
			again.IsSampled() == sc.IsSampled(), "%q: %+v, again %+v", header, sc, again)
	})
}
