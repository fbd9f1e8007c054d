"""What EC2 would refuse of a file for Ray's launcher, or what would cost money or safety without a word.

Source: as `aws`.
"""

from __future__ import annotations

import re
from typing import Any

from raypool.cloud import resource_checks
from raypool.cloud.documents import PLACEHOLDER, Findings, Keys
from raypool.cloud.machines import catalogue
from raypool.errors import CloudError

PROVIDER = (
    "type",
    "region",
    "availability_zone",
    "cache_stopped_nodes",
    "use_internal_ips",
    "use_external_head_ip",
    "security_group",
    "key_pair",
    "aws_credentials",
    "cloudwatch",
)

# What EC2's RunInstances takes, by the name of an entry, as far as a launcher's file may say it: from Amazon's own description,
# with which a test compares it. One misspelt name in a worker, and the head asks for it again and again, and never has it.
ENTRIES = {
    "node_config": """
        AdditionalInfo BlockDeviceMappings CapacityReservationSpecification CpuOptions CreditSpecification DisableApiStop
        DisableApiTermination EbsOptimized ElasticGpuSpecification ElasticInferenceAccelerators EnablePrimaryIpv6 EnclaveOptions
        HibernationOptions IamInstanceProfile ImageId InstanceInitiatedShutdownBehavior InstanceMarketOptions InstanceType
        Ipv6AddressCount Ipv6Addresses KernelId KeyName LaunchTemplate LicenseSpecifications MaintenanceOptions MetadataOptions
        Monitoring NetworkInterfaces NetworkPerformanceOptions Operator Placement PrivateDnsNameOptions PrivateIpAddress
        RamdiskId SecondaryInterfaces SecurityGroupIds SecurityGroups TagSpecifications UserData
    """,
    "BlockDeviceMappings": "DeviceName Ebs NoDevice VirtualName",
    "Ebs": """
        AvailabilityZone AvailabilityZoneId DeleteOnTermination EbsCardIndex Encrypted Iops KmsKeyId OutpostArn SnapshotId
        Throughput VolumeInitializationRate VolumeSize VolumeType
    """,
    "CapacityReservationSpecification": "CapacityReservationPreference CapacityReservationTarget",
    "CapacityReservationTarget": "CapacityReservationId CapacityReservationResourceGroupArn",
    "CpuOptions": "AmdSevSnp CoreCount NestedVirtualization ThreadsPerCore",
    "IamInstanceProfile": "Arn Name",
    "InstanceMarketOptions": "MarketType SpotOptions",
    "SpotOptions": "BlockDurationMinutes InstanceInterruptionBehavior MaxPrice SpotInstanceType ValidUntil",
    "LaunchTemplate": "LaunchTemplateId LaunchTemplateName Version",
    "MetadataOptions": "HttpEndpoint HttpProtocolIpv6 HttpPutResponseHopLimit HttpTokens InstanceMetadataTags",
    "NetworkInterfaces": """
        AssociateCarrierIpAddress AssociatePublicIpAddress ConnectionTrackingSpecification DeleteOnTermination Description
        DeviceIndex EnaQueueCount EnaSrdSpecification Groups InterfaceType Ipv4PrefixCount Ipv4Prefixes Ipv6AddressCount
        Ipv6Addresses Ipv6PrefixCount Ipv6Prefixes NetworkCardIndex NetworkInterfaceId PrimaryIpv6 PrivateIpAddress
        PrivateIpAddresses SecondaryPrivateIpAddressCount SubnetId
    """,
    "Placement": """
        Affinity AvailabilityZone AvailabilityZoneId GroupId GroupName HostId HostResourceGroupArn PartitionNumber SpreadDomain
        Tenancy
    """,
    "TagSpecifications": "ResourceType Tags",
    "Tags": "Key Value",
}
SUBNETS = "SubnetIds"  # of node_config, Ray's own: it tries them in turn

REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d")

MARKETS = ("spot", "capacity-block")


def check(findings: Findings) -> None:
    """Note what is wrong with a file whose entries are of the right kinds."""
    name = findings.at(("cluster_name",))
    if not re.fullmatch(rf"[A-Za-z0-9][-\w.]{{0,99}}|{PLACEHOLDER}.*", name):
        right = "letters, digits and - _ . only, and not more than 100 of them"
        findings.add(("cluster_name",), f"cluster_name is {name!r}; the names of machines begin with it, so it may have {right}.")
    _check_place(findings)
    for name in findings.at(("available_node_types",)) or ():
        _check_type(findings, name)


def _check_place(findings: Findings) -> None:
    findings.check_keys(("provider",), PROVIDER)
    region = findings.at(("provider", "region"))
    if region is None:
        findings.add(("provider",), "region is missing in provider, such as us-west-2.")
    elif not region.startswith(PLACEHOLDER) and not REGION.fullmatch(region):
        findings.add(("provider", "region"), f"{region!r} is no region; one is named like us-west-2.")
    for zone in (findings.at(("provider", "availability_zone")) or "").split(","):
        if zone and _is_region(region) and not zone.strip().startswith((region, PLACEHOLDER)):
            text = f"the zone {zone.strip()} is not in the region, which is {region}: its zones are {region}a and so on."
            findings.add(("provider", "availability_zone"), text)
    if findings.at(("provider", "security_group")) is not None:
        text = (
            "Ray opens SSH to the whole internet in the security group that it makes, whatever rules stand here. "
            "Make one yourself and give its ID in each node_config, as SecurityGroupIds."
        )
        findings.add(("provider", "security_group"), text)


def _is_region(text: Any) -> bool:
    return isinstance(text, str) and REGION.fullmatch(text) is not None


def _check_type(findings: Findings, name: str) -> None:
    """Look at a type of node."""
    keys: Keys = ("available_node_types", name)
    config: Keys = (*keys, "node_config")
    _check_names(findings, config, "node_config")
    _check_machine(findings, keys)
    _check_disks(findings, config)
    _check_market(findings, config)
    _check_metadata(findings, config)
    if findings.at((*config, "LaunchTemplate")) is not None:
        return  # it may say what follows, and lies with Amazon
    _check_key(findings, config)
    _check_image(findings, config)
    _check_security_groups(findings, config)


def _check_names(findings: Findings, keys: Keys, name: str) -> None:
    """Look at the names in an entry of that name, and in what stands below it."""
    value = findings.at(keys)
    if isinstance(value, list):
        for number in range(len(value)):
            _check_names(findings, (*keys, number), name)
    elif isinstance(value, dict) and name in ENTRIES:
        findings.check_keys(keys, [*ENTRIES[name].split(), *([SUBNETS] if name == "node_config" else [])])
        for each in value:
            _check_names(findings, (*keys, each), each)


def _check_machine(findings: Findings, keys: Keys) -> None:
    """Look at the machine, and at what Ray is told of it."""
    config: Keys = (*keys, "node_config")
    machine = findings.at((*config, "InstanceType"))
    if not isinstance(machine, str):
        findings.add(config, "InstanceType is missing in node_config: the kind of machine, such as g5.xlarge.")
        return
    if machine.startswith(PLACEHOLDER):
        return
    try:
        shape = catalogue("aws").machine(machine)
    except CloudError as error:
        if not _is_known_to_amazon(machine):
            findings.add((*config, "InstanceType"), str(error))
        return
    region = findings.at(("provider", "region"))
    if shape.gpu is not None and _is_region(region):
        try:
            catalogue("aws").check_place(region, shape.gpu)
        except CloudError as error:
            findings.add((*config, "InstanceType"), str(error))
    resource_checks.check(findings, keys, shape, shape.gpu, shape.gpus, is_filled_in=True)


def _is_known_to_amazon(machine: str) -> bool:
    """Say whether boto3, if it is here, has heard of a machine that our catalogue lacks; it knows its name and nothing else."""
    try:
        from botocore.loaders import Loader
    except ImportError:
        return False
    return machine in Loader().load_service_model("ec2", "service-2")["shapes"]["InstanceType"]["enum"]


def _check_disks(findings: Findings, config: Keys) -> None:
    disks = findings.at((*config, "BlockDeviceMappings"))
    if disks is not None and not isinstance(disks, list):
        findings.add((*config, "BlockDeviceMappings"), f"BlockDeviceMappings is {disks!r}; it must be a list of disks.")
    for number in range(len(disks) if isinstance(disks, list) else 0):
        keys = (*config, "BlockDeviceMappings", number, "Ebs", "VolumeSize")
        size = findings.at(keys)
        if size is not None and (not isinstance(size, int) or size < 1):
            findings.add(keys, f"VolumeSize is {size!r}; it must be a whole number of GB, such as 200.")


def _check_market(findings: Findings, config: Keys) -> None:
    keys = (*config, "InstanceMarketOptions")
    options = findings.at(keys)
    if options is None:
        return
    market = options.get("MarketType") if isinstance(options, dict) else options
    if market not in MARKETS:
        findings.add(keys, f"MarketType is {market!r}; it must be `MarketType: spot`, or {MARKETS[1]}.")


def _check_metadata(findings: Findings, config: Keys) -> None:
    keys = (*config, "MetadataOptions", "HttpEndpoint")
    if findings.at(keys) == "disabled":
        text = (
            "without the service for metadata the head may make no machines, and nobody learns that a spot machine is taken "
            "back. It must be enabled; `HttpTokens: required` makes it safe."
        )
        findings.add(keys, text)


def _check_key(findings: Findings, config: Keys) -> None:
    """Look whether it is known on both sides by which key one logs in."""
    has_file, name = findings.at(("auth", "ssh_private_key")) is not None, findings.at((*config, "KeyName"))
    if has_file and name is None and findings.at((*config, "UserData")) is None:
        text = "KeyName is missing in node_config: the name that EC2 knows the key by that auth says to log in with."
        findings.add(config, text)
    elif name is not None and not has_file:
        text = (
            f"KeyName is {name!r}, and auth names no ssh_private_key, so Ray takes a key of its own. "
            "Put the file of this one there, or leave KeyName out."
        )
        findings.add((*config, "KeyName"), text)


def _check_image(findings: Findings, config: Keys) -> None:
    image = findings.at((*config, "ImageId"))
    find = "`raypool cluster init --provider aws` writes the command that finds one"
    if image is None:
        findings.add(config, f"ImageId is missing in node_config: Ray would take an Ubuntu 18.04 of 2022; {find}.")
    elif not isinstance(image, str) or not re.fullmatch(rf"ami-[0-9a-f]{{8,17}}|resolve:ssm:.+|{PLACEHOLDER}.*", image):
        findings.add((*config, "ImageId"), f"{image!r} is no image; one is named like ami-0123456789abcdef0, and {find}.")


def _check_security_groups(findings: Findings, config: Keys) -> None:
    """Look for the groups that say who may reach a machine."""
    interfaces = findings.at((*config, "NetworkInterfaces"))
    if interfaces is not None:
        _check_interfaces(findings, config, interfaces)
        return
    groups = findings.at((*config, "SecurityGroupIds"))
    if groups is None:
        text = (
            "SecurityGroupIds is missing in node_config: Ray would make a group that opens SSH to the whole internet. "
            "Give one that lets in its own members, and your address at port 22."
        )
        findings.add(config, text)
    elif not isinstance(groups, list) or not groups:
        findings.add((*config, "SecurityGroupIds"), f"SecurityGroupIds is {groups!r}; it must be a list with an ID, `- sg-...`.")
    else:
        for number, group in enumerate(groups):
            if not isinstance(group, str) or not re.fullmatch(rf"sg-[0-9a-f]{{8,17}}|{PLACEHOLDER}.*", group):
                text = f"{group!r} is no ID of a security group; one is like sg-0123456789abcdef0 (its name does not do)."
                findings.add((*config, "SecurityGroupIds", number), text)


def _check_interfaces(findings: Findings, config: Keys, interfaces: Any) -> None:
    """Look at a machine whose network interfaces are written out: subnets and groups stand there then, and only there."""
    for name in ("SecurityGroupIds", SUBNETS):
        if findings.at((*config, name)) is not None:
            findings.add((*config, name), f"{name} cannot stand beside NetworkInterfaces: put it into each of these.")
    if not isinstance(interfaces, list) or not interfaces:
        findings.add((*config, "NetworkInterfaces"), f"NetworkInterfaces is {interfaces!r}; it must be a list of interfaces.")
        return
    for number, interface in enumerate(interfaces):
        for name, what in (("Groups", "security groups"), ("SubnetId", "subnet")):
            if not (isinstance(interface, dict) and interface.get(name)):
                findings.add(
                    (*config, "NetworkInterfaces", number), f"{name} is missing: Ray wants the {what} of each interface."
                )
