package wire

import (
	"strings"

	"github.com/weirlimit/weir/limit"
)

// Named returns an error of a call with weir.v1's names of fields in place of the service's: "target.key" for "key",
// and "checks[3].target.limit.window_ns" for "limit.window" of the fourth check.
func Named(e *limit.Error) *limit.Error {
	list, i, name := e.Element()
	switch first, _, _ := strings.Cut(name, "."); first {
	case "policy", "namespace", "key", "limit":
		name = "target." + name
	}
	return limit.NewError(e.Kind, unit(name), e.Message).InList(list, i)
}

// StreamNamed is Named for a CheckStreamRequest, which has a list for each field.
func StreamNamed(e *limit.Error) *limit.Error {
	name := unit(e.Field)
	switch name {
	case "key", "cost", "request_id":
		name += "s"
	case "checks":
		name = "key_lengths" // the only list that always has an element for each check
	}
	return limit.NewError(e.Kind, name, e.Message)
}

// unit returns the name in weir.v1 of a field whose name there says the unit, and of limit.align, which is a field of
// its own there.
func unit(name string) string {
	switch {
	case name == "ttl", strings.HasSuffix(name, "limit.window"):
		return name + "_ns"
	case strings.HasSuffix(name, "limit.ttl"):
		return strings.TrimSuffix(name, "ttl") + "window_ns"
	case strings.HasSuffix(name, "limit.align"):
		return strings.TrimSuffix(name, "align") + "period"
	}
	return name
}

// FieldOf returns the service's name of a field in place of weir.v1's name. The name may begin with an element of a
// list.
func FieldOf(name string) string {
	if at := strings.Index(name, "]."); at >= 0 {
		return name[:at+2] + FieldOf(name[at+2:])
	}
	name = strings.TrimPrefix(strings.TrimPrefix(name, "target."), "override.")
	switch name {
	case "keys", "costs", "request_ids":
		name = strings.TrimSuffix(name, "s")
	case "key_lengths":
		name = "checks"
	case "ttl_ns", "limit.window_ns":
		name = strings.TrimSuffix(name, "_ns")
	}
	return name
}

// Reason returns the message of an error of protojson without its prefix, cut to 200 bytes, since it may repeat the
// caller's input. The prefix ends in a space or in a no-break space.
func Reason(err error) string {
	const most = 200
	text := strings.TrimSpace(strings.TrimPrefix(err.Error(), "proto:"))
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "…"
	}
	return text
}
