package wire

import "strings"

// Field returns the name that a field of a call has in weir.v1's messages, for an error about it: the service's "key" and
// "checks[3].limit.window" are "target.key" and "checks[3].target.limit.window_ns".
func Field(name string) string {
	element, name := element(name)
	switch first, _, _ := strings.Cut(name, "."); first {
	case "policy", "namespace", "key", "limit":
		name = "target." + name
	}
	return element + unit(name)
}

// StreamField is Field for a check that came in a CheckStreamRequest, where each field of all checks is a list.
func StreamField(name string) string {
	switch name {
	case "key", "cost", "request_id":
		return name + "s"
	case "checks":
		return "key_lengths" // the only list that has an element for each
	}
	return unit(name)
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

// FieldOf is the inverse of Field and StreamField, for a caller whose own names are the service's. Both the calendar's period
// and its alignment are the window's.
func FieldOf(name string) string {
	element, name := element(name)
	name = strings.TrimPrefix(strings.TrimPrefix(name, "target."), "override.")
	switch name {
	case "keys", "costs", "request_ids":
		name = strings.TrimSuffix(name, "s")
	case "key_lengths":
		name = "checks"
	case "ttl_ns", "limit.window_ns":
		name = strings.TrimSuffix(name, "_ns")
	}
	return element + name
}

// element parts the name of an element of a batch, such as "checks[3].", from that of its field.
func element(name string) (element, field string) {
	if !strings.HasPrefix(name, "checks[") && !strings.HasPrefix(name, "reserves[") {
		return "", name
	}
	end := strings.Index(name, "].")
	if end < 0 {
		return "", name
	}
	return name[:end+2], name[end+2:]
}
