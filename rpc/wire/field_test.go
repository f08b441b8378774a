package wire

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
)

// TestField: every name is that of a field in the messages, and comes back.
func TestField(t *testing.T) {
	field := func(name string) string { return Named(limit.NewError(limit.Invalid, name, "m")).Field }
	for name, want := range map[string]string{
		"key": "target.key", "policy": "target.policy", "namespace": "target.namespace", "limit": "target.limit",
		"limit.limit": "target.limit.limit", "limit.window": "target.limit.window_ns", "limit.time_zone": "target.limit.time_zone",
		"limit.capacity": "target.limit.capacity", "limit.slots": "target.limit.slots", "limit.algorithm": "target.limit.algorithm",
		"limit.count_denied": "target.limit.count_denied", "cost": "cost", "partial": "partial", "request_id": "request_id",
	} {
		got := field(name)
		expect.True(t, got == want && FieldOf(got) == name, "%s: %s, and back %s", name, got, FieldOf(got))
		for _, list := range []string{"checks", "reserves"} {
			got := Named(limit.NewError(limit.Invalid, name, "m").InList(list, 3))
			of, i, _ := got.Element()
			expect.True(t, got.Field == list+"[3]."+want && FieldOf(got.Field) == list+"[3]."+name && of == list &&
				i == 3, "%s[3].%s: %s, and back %s", list, name, got.Field, FieldOf(got.Field))
		}
		expect.Equal(t, exists((&weirv1.Check{}).ProtoReflect().Descriptor(), want), "", "a Check has no")
	}
	for name, want := range map[string]string{"ttl": "ttl_ns", "": "", "checks": "checks", "checks[3].": "checks[3].", "lease_id": "lease_id"} {
		got := field(name)
		expect.True(t, got == want && FieldOf(got) == name, "%q: %q, and back %q", name, got, FieldOf(got))
	}
	got := field("limit.align")
	expect.True(t, got == "target.limit.period", "%v", got)
	field = func(name string) string { return StreamNamed(limit.NewError(limit.Invalid, name, "m")).Field }
	for name, want := range map[string]string{"checks": "key_lengths", "key": "keys", "cost": "costs", "request_id": "request_ids", "partial": "partial"} {
		got := field(name)
		expect.True(t, got == want && FieldOf(got) == name, "%s: %s, and back %s", name, got, FieldOf(got))
		err := exists((&weirv1.CheckStreamRequest{}).ProtoReflect().Descriptor(), want)
		expect.True(t, err == "", "a CheckStreamRequest has no %s", err)
	}
	got = field("limit.window")
	expect.True(t, got == "limit.window_ns" && FieldOf(got) == "limit.window", "%v", got)
}

// exists says which part of a field's name a message lacks.
func exists(m protoreflect.MessageDescriptor, name string) string {
	for part := range strings.SplitSeq(name, ".") {
		f := m.Fields().ByName(protoreflect.Name(part))
		if f == nil {
			return part
		}
		m = f.Message()
	}
	return ""
}
