package wire

import (
	"strings"

	"github.com/weirlimit/weir/limit"
)

// Named returns an error about a call with the names that fields have in weir.v1's messages: the service's "key" is "target.key", and
// "limit.window" of the fourth check "checks[3].target.limit.window_ns".
func Named(e *limit.Error) *limit.Error {
	list, i, name := e.Element()
	switch first, _, _ := strings.Cut(name, "."); first {
	case "policy", "namespace", "key", "limit":
		name = "target." + name
	}
	return limit.NewError(e.Kind, unit(name), e.Message).InList(list, i)
}

// StreamNamed is Named for an error about a CheckStreamRequest, where each field of all checks is a list.
func StreamNamed(e *limit.Error) *limit.Error {
	name := unit(e.Field)
	switch name {
	case "key", "cost", "request_id":
		name += "s"
	case "checks":
		name = "key_lengths" // the only list that has an element for each
	}
	return limit.NewError(e.Kind, name, e.Message)
}

// unit names the fields that say in which unit they are, and the calendar's, which is a field of its own.
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

// FieldOf returns the service's name of a field that has this one in weir.v1's messages, which may begin with an element of a list. Both the
// calendar's period and its alignment are the window's.
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

// Reason is what protojson says is wrong with JSON, and where, cut to what helps: it may repeat what the caller sent. Its prefix ends in one
// blank or another.
func Reason(err error) string {
	const most = 200
	text := strings.TrimSpace(strings.TrimPrefix(err.Error(), "proto:"))
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "…"
	}
	return text
}
